/* Put before the core by the compiler (-include): the process dies at the fault point whose number
 * PENSTOCK_FAULT_AT gives. Points are in ring.h and in the core, between any two stores to memory
 * that others see. */
#define _GNU_SOURCE
#include <signal.h>
#include <stdlib.h>
#include <unistd.h>

#define PENSTOCK_FAULTS
#define PENSTOCK_FAULT_POINT() penstock_fault_point()

static inline void penstock_fault_point(void)
{
    static long left = -1;
    if (left < 0) {
        const char *at = getenv("PENSTOCK_FAULT_AT");
        left = at == NULL ? 0 : atol(at);
    }
    if (left > 0 && --left == 0)
        kill(getpid(), SIGKILL);
}
