"""Checkpoints that no honest program writes."""

import flatbuffers


class Forger:
    """Builds checkpoints that no honest program writes, with FlatBuffers' own builder."""

    def __init__(self) -> None:
        self.builder = flatbuffers.Builder(0)

    def table(self, **slots) -> int:
        """A table; the keys are `<slot letter><number>`: u offset, i int32, q int64, b bool."""
        self.builder.StartObject(8)
        for key, value in slots.items():
            kind, slot = key[0], int(key[1:])
            if kind == "u":
                self.builder.PrependUOffsetTRelativeSlot(slot, value, 0)
            elif kind == "i":
                self.builder.PrependInt32Slot(slot, value, 0)
            elif kind == "q":
                self.builder.PrependInt64Slot(slot, value, 0)
            else:
                self.builder.PrependBoolSlot(slot, value, 0)
        return self.builder.EndObject()

    def vector(self, items: list[int]) -> int:
        self.builder.StartVector(4, len(items), 4)
        for item in reversed(items):
            self.builder.PrependUOffsetTRelative(item)
        return self.builder.EndVector()

    def dims(self, *dims: int) -> int:
        self.builder.StartVector(8, len(dims), 8)
        for dim in reversed(dims):
            self.builder.PrependInt64(dim)
        return self.builder.EndVector()

    def string(self, text: str | bytes) -> int:
        return self.builder.CreateString(text)

    def raw(self, data: bytes) -> int:
        return self.builder.CreateByteVector(data)

    def tensor(self, name="w", dims=(2,), raw=bytes(8), code=1, **more) -> int:
        slots = {"u0": self.string(name), "u2": self.dims(*dims), "u4": self.raw(raw)}
        return self.table(**slots, i3=code, **more)

    def module(self, *tensors: int, **more) -> int:
        return self.table(u0=self.vector(list(tensors)), u1=self.vector([]), **more)

    def file(self, version=2, **slots) -> bytes:
        root = self.table(i0=version, **slots)
        self.builder.Finish(root, file_identifier=b"ODTC")
        return bytes(self.builder.Output())
