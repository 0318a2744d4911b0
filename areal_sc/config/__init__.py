"""Settings of a run: dataclasses, and the loader that fills and checks them."""
