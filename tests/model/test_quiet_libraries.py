import logging

from finetune.compat.transformers import quiet_libraries


def test_bitsandbytes_says_errors_only(caplog):
    quiet_libraries()
    logger = logging.getLogger("bitsandbytes.autograd._functions")
    logger.warning("MatMul8bitLt: inputs will be cast from %s to float16 during quantization", "torch.bfloat16")
    logger.error("an error")
    assert [record.msg for record in caplog.records] == ["an error"]
