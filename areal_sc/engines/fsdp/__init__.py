"""Training on FSDP ranks. The engine is `areal_sc.engines.fsdp.engine.FSDPEngine`."""
