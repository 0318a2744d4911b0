"""Which start of the script a server obeys."""

from __future__ import annotations

from areal_sc.errors import StaleTerm


class NewestTerm:
    """The newest term that a controller has called with.

    Args:
        number: of what is known already.
    """

    def __init__(self, number: int = 0) -> None:
        self.number = number

    def refusal(self, term: int) -> StaleTerm | None:
        """Why a request of this term is refused; None: it is not. 0 is that of a worker."""
        if not term or term >= self.number:
            self.number = max(self.number, term)
            return None
        return StaleTerm(
            f"another start of the script, of term {self.number}, has taken the run over; this "
            f"one, of term {term}, changes nothing any more"
        )

    def check(self, term: int) -> None:
        """For what began in this term, before its next effect.

        Raises: StaleTerm: a controller of a later one has called since.
        """
        if (stale := self.refusal(term)) is not None:
            raise stale
