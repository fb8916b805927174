"""Memory of a CUDA device that grows where it is.

Addresses are reserved for all that a buffer may ever hold, and memory is mapped to them piece by
piece: the driver's virtual memory management. A pointer into the buffer never changes, so graphs
that were captured with it stay valid.

What new memory holds is undefined.
"""

from __future__ import annotations

import ctypes
import weakref
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint64, c_void_p
from typing import TYPE_CHECKING, Any, Final

from asyncllm.errors import AsyncLLMError

if TYPE_CHECKING:
    from torch import Tensor


class DeviceMemoryError(AsyncLLMError):
    """The driver refused; the message names its function and its error."""


class OutOfDeviceMemoryError(DeviceMemoryError):
    """The device has no more memory."""


# As in cuda.h.

_SUCCESS: Final = 0
_OUT_OF_MEMORY: Final = 2
_PINNED: Final = 1  # CU_MEM_ALLOCATION_TYPE_PINNED
_DEVICE: Final = 1  # CU_MEM_LOCATION_TYPE_DEVICE
_READ_WRITE: Final = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE
_VIRTUAL_MEMORY: Final = 102  # CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED


class Location(ctypes.Structure):
    """`CUmemLocation`."""

    _fields_ = (("type", c_int), ("id", c_int))


class AllocationFlags(ctypes.Structure):
    """`allocFlags` of `CUmemAllocationProp`."""

    _fields_ = (
        ("compression_type", ctypes.c_ubyte),
        ("gpu_direct_rdma_capable", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class Allocation(ctypes.Structure):
    """`CUmemAllocationProp`."""

    _fields_ = (
        ("type", c_int),
        ("requested_handle_types", c_int),
        ("location", Location),
        ("win32_handle_meta_data", c_void_p),
        ("flags", AllocationFlags),
    )


class Access(ctypes.Structure):
    """`CUmemAccessDesc`."""

    _fields_ = (("location", Location), ("flags", c_int))


_SIGNATURES: Final[dict[str, tuple[Any, ...]]] = {
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuMemGetAllocationGranularity": (POINTER(c_size_t), POINTER(Allocation), c_int),
    "cuMemAddressReserve": (POINTER(c_uint64), c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemAddressFree": (c_uint64, c_size_t),
    "cuMemCreate": (POINTER(c_uint64), c_size_t, POINTER(Allocation), c_uint64),
    "cuMemRelease": (c_uint64,),
    "cuMemMap": (c_uint64, c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemSetAccess": (c_uint64, c_size_t, POINTER(Access), c_size_t),
    "cuMemUnmap": (c_uint64, c_size_t),
}


def _load() -> Any:
    library = ctypes.CDLL("libcuda.so.1")
    for name, types in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = types, c_int
    return library


class CudaDriver:
    """What the driver does with a device's memory. Sizes are multiples of `piece_bytes`.

    Args:
        device: as torch calls it.
        library: the driver's functions; `None`: those of this machine.

    Attributes:
        piece_bytes: the least that can be mapped.

    Raises:
        DeviceMemoryError: the device has no virtual memory management.
        OSError: the driver's library is not there.
    """

    def __init__(self, device: str, library: Any = None) -> None:
        import torch

        self._device = torch.device(device)
        if self._device.index is None:
            self._device = torch.device("cuda", torch.cuda.current_device())
        self._library = _load() if library is None else library
        self.wait()  # torch makes the device's context
        place = Location(_DEVICE, self._device.index)
        supported = c_int()
        self._call("cuDeviceGetAttribute", byref(supported), _VIRTUAL_MEMORY, place.id)
        if not supported.value:
            raise DeviceMemoryError(f"{self._device} has no virtual memory management")
        self._allocation = Allocation(type=_PINNED, location=place)
        self._access = Access(place, _READ_WRITE)
        size = c_size_t()
        self._call("cuMemGetAllocationGranularity", byref(size), byref(self._allocation), 0)
        self.piece_bytes = size.value

    def reserve(self, nbytes: int) -> int:
        """Addresses without memory; the first."""
        address = c_uint64()
        self._call("cuMemAddressReserve", byref(address), nbytes, 0, 0, 0)
        return address.value

    def unreserve(self, address: int, nbytes: int) -> None:
        self._call("cuMemAddressFree", address, nbytes)

    def map(self, address: int, nbytes: int) -> None:
        """Give memory to reserved addresses; nothing is left behind where that fails.

        Raises:
            OutOfDeviceMemoryError: there is not so much.
        """
        handle = c_uint64()
        self._call("cuMemCreate", byref(handle), nbytes, byref(self._allocation), 0)
        try:
            self._call("cuMemMap", address, nbytes, 0, handle.value, 0)
        finally:
            self._call("cuMemRelease", handle.value)  # from now on the mapping holds the memory
        try:
            self._call("cuMemSetAccess", address, nbytes, byref(self._access), 1)
        except DeviceMemoryError:
            self.unmap(address, nbytes)
            raise

    def unmap(self, address: int, nbytes: int) -> None:
        """Take back the memory of one `map`."""
        self._call("cuMemUnmap", address, nbytes)

    def tensor(self, address: int, nbytes: int, owner: object) -> Tensor:
        """Bytes [nbytes] at an address, of which the first has memory; they keep the owner."""
        import torch

        found = torch.as_tensor(_Bytes(address, nbytes, owner), device=self._device)
        if found.data_ptr() != address:
            raise DeviceMemoryError(f"torch copied what lies at {address:#x}")
        return found

    def free_bytes(self) -> int:
        """Bytes of the device that nobody has."""
        import torch

        return int(torch.cuda.mem_get_info(self._device)[0])

    def trim(self) -> None:
        """Have torch give back what it keeps for later."""
        import torch

        torch.cuda.empty_cache()

    def wait(self) -> None:
        """Return when the device has nothing to do."""
        import torch

        torch.cuda.synchronize(self._device)

    def _call(self, name: str, *arguments: object) -> None:
        result = getattr(self._library, name)(*arguments)
        if result == _SUCCESS:
            return
        text = c_char_p()
        self._library.cuGetErrorName(result, byref(text))
        error = OutOfDeviceMemoryError if result == _OUT_OF_MEMORY else DeviceMemoryError
        raise error(f"{name}: {(text.value or b'unknown error').decode()} ({result})")


class _Bytes:
    """What torch takes for an array on a device."""

    def __init__(self, address: int, nbytes: int, owner: object) -> None:
        self._owner = owner
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


class GrowingBuffers:
    """Buffers of one size that are given memory together, from their starts on.

    Args:
        driver: of the device.
        count: of buffers.
        nbytes: of each, in full.

    Attributes:
        mapped_bytes: of each buffer that have memory.
        close: gives everything back when the device is idle; idempotent, and done at the latest
            when neither this nor a tensor of it is referred to.
    """

    def __init__(self, driver: CudaDriver, count: int, nbytes: int) -> None:
        self.mapped_bytes = 0
        self._driver, self._nbytes = driver, nbytes
        self._addresses: list[int] = []
        self._mapped: list[tuple[int, int]] = []  # where, from each start, and how many bytes
        reserved = self._pieces(nbytes) * driver.piece_bytes
        self.close = weakref.finalize(
            self, _give_back, driver, self._addresses, reserved, self._mapped
        )
        self.close.atexit = False  # the process gives back everything anyway
        try:
            for _ in range(count):
                self._addresses.append(driver.reserve(reserved))
        except BaseException:
            self.close()
            raise

    @property
    def taken_bytes(self) -> int:
        """Bytes of memory in all."""
        return len(self._addresses) * self.mapped_bytes

    def tensor(self, index: int) -> Tensor:
        """A buffer in full, uint8 [nbytes]; only the mapped part may be touched."""
        return self._driver.tensor(self._addresses[index], self._nbytes, self)

    def extend(self, nbytes: int, spare_bytes: int) -> None:
        """See that the first `nbytes` of each buffer have memory, or as many as there is for.

        Args:
            nbytes: of each buffer.
            spare_bytes: of the device that shall stay free.

        Raises:
            DeviceMemoryError: the driver failed otherwise than for want of memory.
        """
        wanted = self._pieces(min(nbytes, self._nbytes) - self.mapped_bytes)
        if wanted <= 0:
            return
        trimmed = wanted > self._affordable(spare_bytes)
        if trimmed:
            self._driver.trim()
            wanted = min(wanted, self._affordable(spare_bytes))
        # Others use the device too: what was free may be gone by now.
        step = wanted
        while step > 0:
            if self._map(step * self._driver.piece_bytes):
                wanted -= step
                step = min(step, wanted)
            elif not trimmed:
                self._driver.trim()
                trimmed = True
            else:
                step //= 2

    def _pieces(self, nbytes: int) -> int:
        return -(-nbytes // self._driver.piece_bytes)

    def _affordable(self, spare_bytes: int) -> int:
        """Pieces that each buffer could have now."""
        free = max(0, self._driver.free_bytes() - spare_bytes)
        return free // (len(self._addresses) * self._driver.piece_bytes)

    def _map(self, nbytes: int) -> bool:
        """So many bytes more for every buffer, or for none; whether there was memory."""
        done: list[int] = []
        try:
            for address in self._addresses:
                self._driver.map(address + self.mapped_bytes, nbytes)
                done.append(address)
        except DeviceMemoryError as error:
            for address in done:
                self._driver.unmap(address + self.mapped_bytes, nbytes)
            if isinstance(error, OutOfDeviceMemoryError):
                return False
            raise
        self._mapped.append((self.mapped_bytes, nbytes))
        self.mapped_bytes += nbytes
        return True


def _give_back(
    driver: CudaDriver, addresses: list[int], reserved: int, mapped: list[tuple[int, int]]
) -> None:
    driver.wait()
    for address in addresses:
        for start, nbytes in mapped:
            driver.unmap(address + start, nbytes)
        driver.unreserve(address, reserved)
