"""The error that the stand-in device raises."""


class DeviceFault(Exception):
    """Error where CUDA would report an error, return wrong numbers, or end the process."""
