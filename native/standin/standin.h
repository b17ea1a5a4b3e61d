// Between the two stand-in libraries: what the stand-in of NCCL asks of the stand-in of the CUDA
// runtime. All calls from any thread.
#pragma once

#include <cstddef>

extern "C" {

int StandinCurrentDevice();
// The device of a live stream, else -1.
int StandinStreamDevice(const void* stream);
// [data, data + nbytes) lies in one live allocation of cudaMalloc on `device`.
bool StandinIsDeviceMemory(const void* data, size_t nbytes, int device);
// Runs fn(data) behind what the stream has. The stream must be live.
void StandinEnqueue(void* stream, void (*fn)(void*), void* data);
// Allocations, streams and events (libcudart), communicators (libnccl) that are not freed yet: for
// tests.
int StandinCudaLive();
int StandinNcclLive();

}  // extern "C"
