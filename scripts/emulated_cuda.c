/* The calls of CUDA's runtime that PyTorch makes, for a device whose memory is the host's. All work
   is done when a call returns. `emulated_cuda.py` adds those that do nothing. */

#include <stddef.h>
#include <stdlib.h>
#include <string.h>

static int make(void **made, size_t bytes) {
    *made = aligned_alloc(512, (bytes / 512 + 1) * 512);
    return 0;
}

int cudaGetDeviceCount(int *count) { *count = 1; return 0; }
int cudaGetDevice(int *device) { *device = 0; return 0; }
int cudaDriverGetVersion(int *version) { *version = 13000; return 0; }
int cudaRuntimeGetVersion(int *version) { *version = 13000; return 0; }
const char *cudaGetErrorString(int error) { return "an error of the emulated device"; }
const char *cudaGetErrorName(int error) { return "emulated"; }

int cudaGetDeviceProperties(char *properties, int device) { /* of cudaDeviceProp in CUDA 12 and 13 */
    memset(properties, 0, 400);
    strcpy(properties, "an emulated device");
    *(size_t *)(properties + 288) = (size_t)1 << 37; /* totalGlobalMem */
    *(int *)(properties + 308) = 32;                 /* warpSize */
    *(int *)(properties + 320) = 1024;               /* maxThreadsPerBlock */
    *(int *)(properties + 360) = 9;                  /* major */
    return 0;
}
int cudaDeviceGetAttribute(int *value, int attribute, int device) { *value = 0; return 0; }
int cudaPointerGetAttributes(void *attributes, void *pointer) { memset(attributes, 0, 32); return 0; }
int cudaMemGetInfo(size_t *unused, size_t *total) { *unused = *total = (size_t)1 << 37; return 0; }

int cudaMalloc(void **made, size_t bytes) { return make(made, bytes); }
int cudaHostAlloc(void **made, size_t bytes, unsigned flags) { return make(made, bytes); }
int cudaFree(void *memory) { free(memory); return 0; }
int cudaFreeHost(void *memory) { free(memory); return 0; }
int cudaMemcpy(void *to, void *from, size_t bytes, int kind) { memcpy(to, from, bytes); return 0; }
int cudaMemcpyAsync(void *to, void *from, size_t bytes, int kind, void *stream) {
    memcpy(to, from, bytes);
    return 0;
}
int cudaMemset(void *at, int value, size_t bytes) { memset(at, value, bytes); return 0; }
int cudaMemsetAsync(void *at, int value, size_t bytes, void *stream) {
    memset(at, value, bytes);
    return 0;
}

int cudaStreamCreate(void **made) { return make(made, 1); }
int cudaStreamCreateWithFlags(void **made, unsigned flags) { return make(made, 1); }
int cudaStreamCreateWithPriority(void **made, unsigned flags, int priority) { return make(made, 1); }
int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0;
    *greatest = -1;
    return 0;
}
int cudaStreamIsCapturing(void *stream, int *status) { *status = 0; return 0; }
int cudaStreamGetCaptureInfo(void *stream, int *status) { *status = 0; return 0; }
int cudaEventCreateWithFlags(void **made, unsigned flags) { return make(made, 1); }
int cudaEventElapsedTime(float *milliseconds) { *milliseconds = 1; return 0; }
int cudaGetDriverEntryPointByVersion(const char *name, void **entry, unsigned version,
                                     unsigned long flags, int *result) {
    *entry = NULL;
    if (result) *result = 1; /* there is none of this name */
    return 0;
}
