#include "tiles_int.h"

namespace lockstep::products {

TileKernels int5_kernels(Scales scales) {
    if (scales == Scales::kFactors) return int_kernels<Int5Codes, Scales::kFactors>();
    return int_kernels<Int5Codes, Scales::kFloat16>();
}

}  // namespace lockstep::products
