"""Games of several seats from one of them: whose turn it is, who plays the others, and what their moves depend on."""

import random

import gymnasium
import numpy as np
import pytest
from tests.rollout.doubles import FakeServer

import shoal.envs
from shoal.cli.main import main
from shoal.core.errors import ConfigError, EnvError
from shoal.envs.catalogue import resolve
from shoal.testing import check_text_env

FOUR = "pettingzoo.classic.connect_four_v3"
THREE = "pettingzoo.classic.tictactoe_v3"
pytestmark = pytest.mark.filterwarnings("ignore")


def turn_game(**kwargs):
    return resolve("pettingzoo", env_kwargs={"id": FOUR, **kwargs})()


def played(env, seed):
    """An episode of random legal moves: all that it showed."""
    choose = random.Random(seed)
    seen, info = env.reset(seed=seed)
    shown, over = [seen.tolist()], False
    while not over:
        move = choose.choice(np.flatnonzero(info["action_mask"]).tolist())
        seen, reward, terminated, truncated, info = env.step(move)
        over = terminated or truncated
        shown.append((move, seen.tolist(), reward, terminated, truncated, info["success"]))
    return shown


# --- games of PettingZoo
def test_a_turn_game_is_one_seat_of_the_game_itself():
    """The same moves, played by hand on PettingZoo's own game, give the same boards and the same end."""
    from pettingzoo.classic import connect_four_v3

    env = turn_game(seat=0, opponent={"plays": f"{__name__}:leftmost"})
    seen, info = env.reset(seed=5)
    game = connect_four_v3.env()
    game.reset(seed=5)
    for count, move in enumerate((3, 3, 3, 3)):
        assert np.array_equal(seen, game.last()[0]["observation"])
        assert np.array_equal(info["action_mask"], game.last()[0]["action_mask"])
        seen, reward, terminated, truncated, info = env.step(move)
        game.step(move)
        if count < 3:
            game.step(0)
    assert (reward, terminated, truncated, info["success"]) == (1.0, True, False, True)
    assert game.rewards["player_0"] == 1


def leftmost(seen, moves):
    return moves[0]


def test_the_seed_alone_fixes_seat_and_moves_of_the_others():
    episodes = [played(turn_game(), seed) for seed in range(6)]
    used = turn_game()
    assert [played(used, seed) for seed in reversed(range(6))] == episodes[::-1]
    assert len({str(episode) for episode in episodes}) == 6
    first_boards = [np.sum(episode[0]) for episode in episodes]
    assert {0, 1} == {int(pieces) for pieces in first_boards}, "both seats are drawn"


def test_no_move_of_a_random_opponent_is_illegal():
    for seed in range(30):
        last = played(turn_game(), seed)[-1]
        assert last[2] in (-1, 0, 1)
        assert last[3]
        assert last[5] is (last[2] == 1)


def test_agents_see_a_board_and_are_offered_the_legal_moves():
    env = shoal.envs.make("pettingzoo", id=FOUR, seat=0)
    seen, _ = env.reset(seed=0)
    assert seen == "0 1 2 3 4 5 6\n" + "\n".join([". . . . . . ."] * 6)
    assert "connect four" in env.instructions
    for _ in range(3):
        seen, _, _, _, info = env.step("2")
    marks = seen.split()
    assert (marks.count("X"), marks.count("O")) == (3, 3)
    column = [row.split()[2] for row in seen.split("\n")[1:]]
    assert ("2" in info["available_actions"]) == (column[0] == ".")
    check_text_env(lambda: shoal.envs.make("pettingzoo", id=FOUR), seeds=range(2))
    check_text_env(lambda: shoal.envs.make("pettingzoo", id=THREE, seat=1), seeds=range(2))


def test_a_turn_game_is_an_env_of_gymnasium():
    env = turn_game()
    assert env.action_space == gymnasium.spaces.Discrete(7)
    assert env.observation_space.shape == (6, 7, 2)
    assert isinstance(env, gymnasium.Env)
    vector = shoal.make_vec("pettingzoo", 3, env_kwargs={"id": FOUR}, backend="serial")
    seen, info = vector.reset(seed=1)
    assert seen.shape == (3, 6, 7, 2)
    assert info["action_mask"].shape == (3, 7)
    vector.close()
    assert main(["envs", "check", "pettingzoo", f"id={FOUR}", "--episodes", "2"]) == 0


@pytest.mark.parametrize(
    ("kwargs", "said"),
    [
        ({"id": "pettingzoo.classic.no_such_game"}, "is no game of PettingZoo: No module named"),
        ({"id": "json:dumps"}, "'json:dumps' cannot be made: .*missing 1 required"),
        ({"id": "json:JSONEncoder"}, "is no game in which agents take turns"),
        ({"kwargs": {"wings": 2}}, "cannot be made: .*unexpected keyword argument 'wings'"),
        ({"seat": 2}, "seat must be from 0 to 1, got 2"),
        ({"opponent": {"plays": "clever"}}, "must be 'random', 'module:function' or the address of a server"),
        ({"opponent": {"play": "random"}}, "no setting 'play'.* Did you mean 'plays'"),
        ({"opponent": {"plays": "http://127.0.0.1:9/v1"}}, "opponent.model must name the model"),
        ({"opponent": {"plays": "json:no_such"}}, "holds nothing of that name"),
        ({"render_mode": "3d"}, "has no render_mode '3d'"),
    ],
)
def test_a_turn_game_that_cannot_be_made_says_why(kwargs, said):
    with pytest.raises((ConfigError, TypeError), match=said):
        turn_game(**kwargs)


# --- games of TextArena
def tic_tac_toe(**settings):
    return shoal.envs.make("textarena", id="TicTacToe-v0", num_players=2, **settings)


def test_textarena_games_of_two_are_played_from_one_seat():
    pytest.importorskip("textarena")
    env = tic_tac_toe(seat=1)
    seen, info = env.reset(seed=0)
    assert "As Player 1, you will be 'X'" in seen
    assert seen.count("Player 0: [") == 1, "the move of the other"
    assert len(info["available_actions"]) == 8
    taken = {*map(str, range(9))} - {word.strip("[]") for word in info["available_actions"]}
    assert f"Player 0: [{taken.pop()}]" in seen
    results = []
    for seed in range(12):
        _, info = env.reset(seed=seed)
        over, choose = False, random.Random(seed)
        while not over:
            _, reward, terminated, truncated, info = env.step(choose.choice(info["available_actions"]))
            over = terminated or truncated
        results.append(reward)
        assert info["success"] is (reward == 1)
    assert {-1.0, 1.0} <= {*results}
    check_text_env(tic_tac_toe, seeds=range(2))
    assert env.draws_actions
    _, info = env.reset(seed=0)
    drawn = {env.random_action(np.random.default_rng(seed)) for seed in range(60)}
    assert drawn == {*info["available_actions"]}


def first_listed(seen, moves):
    rules, news = seen
    assert "Tic Tac Toe" in rules
    assert "Current Board" in news
    return moves[0]


def nim(seen):
    return "[2 1]"


def test_a_function_plays_the_other_seat():
    pytest.importorskip("textarena")
    env = tic_tac_toe(seat=0, opponent={"plays": f"{__name__}:first_listed"})
    env.reset(seed=0)
    seen, *_ = env.step("[4]")
    assert "Player 1: [0]" in seen
    seen, *_ = env.step("[8]")
    assert "Player 1: [1]" in seen
    game = shoal.envs.make(
        "textarena", id="Nim-v0", num_players=2, seat=1, opponent={"plays": f"{__name__}:nim"}
    )
    assert "Player 0: [2 1]" in game.reset(seed=0)[0]


def test_a_game_that_lists_no_moves_has_no_random_opponent():
    pytest.importorskip("textarena")
    env = shoal.envs.make("textarena", id="Nim-v0", num_players=2, seat=1)
    with pytest.raises(EnvError, match=r"does not list its legal moves.*set opponent\.plays to a function"):
        env.reset(seed=0)
    assert not shoal.envs.make("textarena", id="Nim-v0", num_players=2, seat=0).draws_actions


# --- a model behind a server
@pytest.fixture
def server():
    with FakeServer("vllm") as server:
        yield server


def against(server, **more):
    return tic_tac_toe(seat=0, opponent={"plays": f"{server.url}/v1", "model": "m", **more})


def test_a_model_behind_a_server_plays_the_other_seat_and_is_asked_again_when_it_is_busy(server):
    pytest.importorskip("textarena")
    server.faults, server.say = [503], lambda said: "I take [0]."
    env = against(server)
    env.reset(seed=0)
    seen, *_ = env.step("[4]")
    assert "Player 1 placed their symbol (X) in cell 0" in seen
    (path, body, _), again = server.seen
    assert (path, body) == again[:2]
    assert path == "/v1/chat/completions"
    assert (body["model"], body["temperature"]) == ("m", 0.0)
    assert [message["role"] for message in body["messages"]] == ["system", "user"]
    assert "You are Player 1" in body["messages"][0]["content"]


@pytest.mark.parametrize(("status", "said"), [(401, "HTTPError: HTTP Error 401"), (503, "HTTP Error 503")])
def test_a_server_that_gives_no_move_is_an_error_with_its_reason(server, status, said):
    pytest.importorskip("textarena")
    server.faults = [status] * 9
    env = against(server, timeout=0.6)
    env.reset(seed=0)
    with pytest.raises(EnvError, match=rf"the opponent at http://127.*gave no move: .*{said}"):
        env.step("[4]")
    assert len(server.seen) == (1 if status == 401 else 2)
