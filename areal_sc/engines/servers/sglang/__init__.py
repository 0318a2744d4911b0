"""Generation by SGLang servers. The engine is `engine.SGLangServerEngine`."""
