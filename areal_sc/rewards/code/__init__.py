"""Reading and judging answers that are programs: their code, its tests, what it printed."""
