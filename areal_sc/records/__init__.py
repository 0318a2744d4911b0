"""What is written of a run for people: metrics, samples, records, and where they are sent.

`rows`, `spans` and `steps` read what a run has recorded.
"""

from areal_sc.records.reading import Row, rows, spans, steps

__all__ = ["Row", "rows", "spans", "steps"]
