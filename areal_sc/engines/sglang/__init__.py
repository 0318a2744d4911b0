"""Generation by SGLang servers. The engine is `areal_sc.engines.sglang.engine.SGLangEngine`."""
