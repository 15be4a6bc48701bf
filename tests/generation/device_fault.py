"""What the device that is not there raises."""


class DeviceFault(Exception):
    """What CUDA would answer with an error, with wrong numbers, or by ending the process."""
