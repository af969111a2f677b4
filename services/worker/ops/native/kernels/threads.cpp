// The threads that kernels run on.
#include <omp.h>

#include "abi.h"

// How many threads a kernel runs on: as many as torch.
LS_EXPORT int64_t ls_num_threads() { return omp_get_max_threads(); }
