"""What is written of a run for people: metrics, samples, records, and where they are sent.

`rows`, `spans` and `steps` read what a run has recorded; `trace_events` is for Perfetto.
"""

from areal_sc.records.reading import Row, rows, spans, steps, trace_events

__all__ = ["Row", "rows", "spans", "steps", "trace_events"]
