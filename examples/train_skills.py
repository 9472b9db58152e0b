"""Three skills that build on each other are trained from nothing in seconds, and their chain works in new worlds."""

import tempfile

from shoal import SkillScheduler
from shoal.skills.learning.episodes import evaluate_chain
from shoal.skills.proposers import KnowledgeBase, knowledge_base


def main() -> None:
    """Train wood, table and pickaxe two at a time, and play them one after another in 256 unseen worlds."""
    with tempfile.TemporaryDirectory() as folder:
        scheduler = SkillScheduler(folder, max_parallel=2)
        proposer = KnowledgeBase(knowledge_base("crafting"), scheduler.features, max_nodes=3)
        assert scheduler.run(proposer)
        report = evaluate_chain(scheduler.store, episodes=256)
        for step, reached in zip(report.plan, report.reached, strict=True):
            print(f"{reached:.2f}  {step.skill} x{step.count}")
        assert report.success > 0.8
        scheduler.close()


if __name__ == "__main__":
    main()
