"""Which operating point a run should have: how many workers train, how many generate, how stale.

metrics.jsonl ─► figures ─► forecast ─► advice
                 measured   of another   the point that suffices,
                            point        and what it would gain
"""
