"""Bodies of passes that are cut short."""

from __future__ import annotations

import pytest
from tinker.proto import tinker_public_pb2 as pb

from areal_sc.serving.wire import RequestRefused, cut_pass, head_of_pass, read_pass


@pytest.mark.parametrize("num_rows", [0, 1, 10, 300])
def test_a_pass_that_was_cut_says_whose_it_is(num_rows: int) -> None:
    asked = pb.ForwardBackwardRequest(model_id="a-b:train:0", seq_id=300, loss_fn="ppo")
    for _ in range(num_rows):
        asked.data.add().loss_fn_inputs["weights"].dense = b"1234"
    cut = cut_pass(bytearray(asked.SerializeToString()))
    with pytest.raises(RequestRefused, match="no ForwardBackwardRequest of at most 64 MiB"):
        read_pass(cut)
    head = head_of_pass(cut)
    assert (head.model_id, head.seq_id) == ("a-b:train:0", 300)


@pytest.mark.parametrize("body", [b"", b"\x00", b"\xff" * 2000, b"\x0a\x05hello"])
def test_what_is_no_pass_is_of_nobody(body: bytes) -> None:
    with pytest.raises(RequestRefused, match="no ForwardBackwardRequest"):
        head_of_pass(body)
