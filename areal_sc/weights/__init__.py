"""The way of each policy version from the ranks that trained it to the engines that sample from it.

    controllers   train_step ─► channel ──────────► updates ──► tree
                                │ seal, broadcast  │ adopt, copy
    workers                 rank_weights ─ published ► adopter ──► the engine

`published` says what a version is: its shards, what has changed in them (`changes`), a folder, or a
broadcast to a `group`. `methods` declares what workers are asked for.
"""
