"""What a mistake is here: a plan changed in one place, and the words for it."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from lydite.conform.replay import UNUSABLE, Plan


@dataclass(frozen=True)
class Mistake:
    """`apply` gives the plan of a candidate that makes it, or None where it could not be made."""

    cause: str  # one word, for machines and tests
    says: str  # what the candidate did, as the end of "the candidate …"
    fix: str
    apply: Callable[[Plan], Plan | None]

    def applied_to(self, plan: Plan) -> Plan | None:
        """`apply`, with None also for a plan that is too odd to make the mistake on."""
        try:
            with np.errstate(all="ignore"):
                return self.apply(plan)
        except UNUSABLE:
            return None
