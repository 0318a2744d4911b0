"""What runs in the processes of a vLLM server, by the interpreter and the packages of vLLM.

- `python -m areal_sc_in_vllm` is the server's main program.
- `key.DemandKey` lets nobody in without the server's key.
- `weights.WeightLoader` gives a rank new weights.
"""
