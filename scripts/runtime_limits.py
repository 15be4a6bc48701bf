"""The highest opset and IR version that an ONNX Runtime reads, for builder/common/releases.toml.

It imports onnxruntime only. Run it with the requested version before this build's own.
"""

import onnxruntime


def main() -> None:
    """Print the line of releases.toml for this version."""
    onnxruntime.set_default_logger_severity(4)
    opset = max(opset for opset in range(13, 40) if _reads(opset, 8))
    ir_version = max(ir for ir in range(8, 30) if _reads(opset, ir))
    print(f'"{onnxruntime.__version__}" = [{opset}, {ir_version}]')


def _reads(opset: int, ir_version: int) -> bool:
    try:
        onnxruntime.InferenceSession(_identity(opset, ir_version), providers=["CPUExecutionProvider"])
    except Exception:
        return False
    return True


def _identity(opset: int, ir_version: int) -> bytes:
    """Return a ModelProto with one Identity node in protobuf's own encoding: onnx is not available here."""

    def field(number: int, content: bytes) -> bytes:
        return bytes([number << 3 | 2, len(content)]) + content

    real = field(1, b"\x08\x01" + field(2, field(1, b"\x08\x01")))  # TypeProto: tensor of FLOAT, shape [1]
    node = field(1, b"x") + field(2, b"y") + field(4, b"Identity")
    graph = field(1, node) + field(2, b"g")
    graph += field(11, field(1, b"x") + field(2, real)) + field(12, field(1, b"y") + field(2, real))
    return b"\x08" + bytes([ir_version]) + field(7, graph) + field(8, field(1, b"") + b"\x10" + bytes([opset]))


if __name__ == "__main__":
    main()
