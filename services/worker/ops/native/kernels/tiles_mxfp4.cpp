#include "tiles_int.h"

namespace lockstep::products {

TileKernels mxfp4_kernels() { return int_kernels<Mxfp4Codes, Scales::kPower>(); }

}  // namespace lockstep::products
