"""Studies: the figures of a release, each a question answered with data from our own runs."""

from fa3_reports.studies import accumulator_loss, budget, errors, growth, outliers, paper, rotation, usage
from fa3_reports.studies.study import Records, Study

STUDIES: tuple[Study, ...] = (
    paper.STUDY,
    accumulator_loss.STUDY,
    outliers.STUDY,
    errors.STUDY,
    growth.STUDY,
    usage.STUDY,
    budget.STUDY,
    rotation.STUDY,
)

__all__ = ["STUDIES", "Records", "Study"]
