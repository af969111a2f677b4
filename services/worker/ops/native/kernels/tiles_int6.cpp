#include "tiles_int.h"

namespace lockstep::products {

TileKernels int6_kernels() { return int_kernels<Int6Codes, Scales::kFactors16>(); }

}  // namespace lockstep::products
