// A function that is only named, under its symbol in the libraries that need it to load: it stops the process.
#pragma once

#include "../sim.h"

#define STOPS_PASTE(A, B) A##B
#define STOPS_NAME(LINE) STOPS_PASTE(npusim_stops_, LINE)
#define STOPS(SYMBOL, NAME)                                                                                                  \
    extern "C" __attribute__((noreturn, visibility("default"))) void STOPS_NAME(__LINE__)() __asm__(#SYMBOL); \
    void STOPS_NAME(__LINE__)() { npusim::unsimulated(NAME); }
