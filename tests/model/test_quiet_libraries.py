"""What the libraries say in a run's log."""

import logging

import torch
from bitsandbytes.nn import Linear8bitLt

from finetune.model.library_warnings import quiet_libraries


def test_int8_says_once_that_it_casts_its_inputs_to_fp16(caplog):
    quiet_libraries()
    quiet_libraries()
    logger = logging.getLogger("bitsandbytes.autograd._functions")
    for existing in logger.filters:
        existing.emitted = False  # another test of this process may have heard it
    layer = Linear8bitLt(64, 64, has_fp16_weights=False, threshold=6.0).to("cpu").eval()
    with caplog.at_level(logging.WARNING, logger="bitsandbytes"):
        for _ in range(3):
            layer(torch.ones(2, 64, dtype=torch.bfloat16))
        logger.warning("another warning")
    assert [record.msg.split(":")[0] for record in caplog.records] == ["MatMul8bitLt", "another warning"]
