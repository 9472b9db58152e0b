"""WebShop offline: catalogues, search, pages, the published reward, and the env on top of them."""

from shoal.envs.webshop.catalogue import Catalogue, Goal, Product, load_catalogue, make_goals, search
from shoal.envs.webshop.env import WebShopConfig, WebShopEnv, expert_action
from shoal.envs.webshop.generator import generate_catalogue
from shoal.envs.webshop.scoring import Reward, reward

__all__ = [
    "Catalogue",
    "Goal",
    "Product",
    "Reward",
    "WebShopConfig",
    "WebShopEnv",
    "expert_action",
    "generate_catalogue",
    "load_catalogue",
    "make_goals",
    "reward",
    "search",
]
