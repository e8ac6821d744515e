"""How the verdict on a claim of a paper follows from what was measured: papers.py has the claims.

A claim has conditions, each with a line of the stored rows that meet it: it holds, it does not, or it is undecided,
because the row is not what the claim is about (a smaller model than the claim's) or cannot tell (a task that dense
attention does not solve either). All rows that meet the claim's setting are conditions, the worst and the best.
"""

import dataclasses

# What makes a measurement another thing than the claim: it then decides nothing, whichever way it went.
APART = {
    "implementation": "other code, or another way to run it, than the claim's",
    "quantity": "another quantity than the claim's",
    "form": "another form of the method",
    "training": "kinds trained unlike each other, or a task that no kind learned",
}
VERDICTS = ["reproduced", "partly", "refuted", "not reproduced", "not comparable", "not run"]


@dataclasses.dataclass(frozen=True)
class Claim:
    """A claim in the paper's words and what was found here."""

    says: str
    condition: str = "-"
    here: str = "-"
    # Of each measurement, by what it is: True, False, or None where it is undecided.
    holds: dict = dataclasses.field(default_factory=dict)
    differs: str = ""
    rows: str = "-"
    # One of APART.
    apart: str = ""
    # Whether the paper's own setting ran: its model, its text and its code.
    own_setting: bool = False

    @property
    def verdict(self):
        """One of VERDICTS: reproduced where all measurements hold, partly where some do, refuted where none does in the
        paper's own setting, else not reproduced. Not comparable where all are undecided, or `apart` is given."""
        decided = [held for held in self.holds.values() if held is not None]
        if not self.holds:
            return "not run"
        if self.apart or not decided:
            return "not comparable"
        if any(decided):
            return "reproduced" if all(self.holds.values()) else "partly"
        return "refuted" if self.own_setting else "not reproduced"

    def cells(self):
        """The line of the page; a verdict of measured rows is bold, and one that decides nothing says why."""
        verdict = self.verdict if not self.holds else f"**{self.verdict}**"
        return [self.says, self.condition, self.here, f"{verdict}: {self.apart}" if self.apart else verdict,
                self.differs]

    def reasons(self):
        """A line a condition: whether it holds, and what it is."""
        words = {True: "holds", False: "does not hold", None: "undecided"}
        return [f"{words[held]:13}  {what}" for what, held in self.holds.items()]
