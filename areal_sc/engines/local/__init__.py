"""Embedded generation. The engine is `areal_sc.engines.local.engine.LocalEngine`."""
