"""Studies: the figures of a report, each a question answered with data from our own runs."""

from fa3verify.studies import accumulator_loss, budget, errors, growth, outliers, paper, ratio_map, rotation, usage
from fa3verify.studies.study import PROFILES, Profile, Records, Study

STUDIES: tuple[Study, ...] = (
    paper.STUDY,
    accumulator_loss.STUDY,
    outliers.STUDY,
    errors.STUDY,
    ratio_map.STUDY,
    growth.STUDY,
    usage.STUDY,
    budget.STUDY,
    rotation.STUDY,
)

__all__ = ["PROFILES", "STUDIES", "Profile", "Records", "Study"]
