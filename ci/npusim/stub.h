// An operator that torch_npu knows and the tables lack: it is named when it is called. A table's definition wins over
// this weak one.
#pragma once

#include "sim.h"

#define STUB(NAME)                                                                                      \
    extern "C" __attribute__((weak, visibility("default"))) int NAME##GetWorkspaceSize() { npusim::unsimulated(#NAME); } \
    extern "C" __attribute__((weak, visibility("default"))) int NAME() { npusim::unsimulated(#NAME); }
