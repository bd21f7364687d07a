"""A stand-in for pyACL, CANN's Python interface: what vllm-ascend takes from it."""

from acl import rt as rt


def get_soc_name() -> str:
    """Return the device's name, as aclrtGetSocName has it."""
    return rt.library().aclrtGetSocName().decode()
