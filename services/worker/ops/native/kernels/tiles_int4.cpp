#include "tiles_int.h"

namespace lockstep::products {

TileKernels int4_kernels(Scales scales) {
    switch (scales) {
        case Scales::kFloat32: return int_kernels<Int4Codes, Scales::kFloat32>();
        case Scales::kFloat16: return int_kernels<Int4Codes, Scales::kFloat16>();
        case Scales::kFactors: return int_kernels<Int4Codes, Scales::kFactors>();
        case Scales::kFactors16: return int_kernels<Int4Codes, Scales::kFactors16>();
        default: return int_kernels<Int4Codes, Scales::kRow>();
    }
}

}  // namespace lockstep::products
