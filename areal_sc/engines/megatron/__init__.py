"""Training on Megatron-core's ranks. The engine is `areal_sc.engines.megatron.engine`."""
