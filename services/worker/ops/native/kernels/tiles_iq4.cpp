#include "tiles_int.h"

namespace lockstep::products {

TileKernels iq4_kernels(Scales scales) {
    if (scales == Scales::kFactors) return int_kernels<Iq4Codes, Scales::kFactors>();
    return int_kernels<Iq4Codes, Scales::kFloat16>();
}

}  // namespace lockstep::products
