/* Stands for a codelet in a network function: tells its load, and takes commands.
 *
 *     cc -std=c11 -O2 -I include examples/jrtc/codelet.c -o codelet
 *
 * A deployment starts it as an app of type c, and tells it by its environment where the queues of
 * its channels are. Both are there already. Structs are written as they are, without serialising.
 */
#define _GNU_SOURCE
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>

#include <penstock/ring.h>

/* As nanopb generates them for load.proto. */
typedef struct {
    uint32_t count;
    uint32_t interval_us;
    double load;
} telemetry;

typedef struct {
    uint32_t interval_us;
} command;

static volatile sig_atomic_t stopping;

static void stop(int number)
{
    (void)number;
    stopping = 1;
}

static penstock_ring open_queue(const char *variable, int *fd)
{
    penstock_ring ring;
    const char *path = getenv(variable);
    const char *fault = path == NULL ? "is not set" : penstock_map(path, true, &ring, fd);
    if (fault != NULL) {
        fprintf(stderr, "codelet: %s: %s\n", variable, fault);
        exit(1);
    }
    return ring;
}

/* The row of the reader that producers of an input stream wait for. */
static uint32_t consumer_of(const penstock_ring *ring)
{
    for (uint32_t row = 0; row < ring->header->readers; row++)
        if (strcmp(ring->readers[row].name, "consumer") == 0)
            return row;
    fprintf(stderr, "codelet: its commands are not an input stream\n");
    exit(1);
}

int main(void)
{
    int output_fd, input_fd;
    penstock_ring output = open_queue("PENSTOCK_QUEUE_1_LOAD_SET_LOAD_TELEMETRY_OUTPUT", &output_fd);
    penstock_ring input = open_queue("PENSTOCK_QUEUE_1_LOAD_SET_LOAD_COMMANDS_INPUT", &input_fd);
    penstock_writer writer;
    int error = penstock_writer_open(&writer, output, output_fd);
    if (error != 0) {
        fprintf(stderr, "codelet: %s\n", strerror(error));
        return 1;
    }
    signal(SIGTERM, stop);
    uint32_t consumer = consumer_of(&input);
    uint64_t next = input.readers[consumer].position;
    telemetry sample = {.interval_us = 20000};
    while (!stopping) {
        sample.count++;
        sample.load = 0.5 + 0.01 * (sample.count % 20);
        if (penstock_write(&writer, &sample, sizeof sample, 0, 0) != PENSTOCK_OK)
            return 1;
        penstock_slot slot;
        command wanted;
        while (next < penstock_head(&input)) {
            /* Before the payload is a block with the sender's name. */
            if (penstock_slot_of(&input, next, &slot) == PENSTOCK_OK && slot.length == sizeof wanted) {
                memcpy(&wanted, penstock_bytes(&input, &slot) + slot.block, sizeof wanted);
                sample.interval_us = wanted.interval_us;
            }
            penstock_acknowledge(&input, consumer, ++next);
        }
        /* A command need not wait for the next sample. */
        penstock_sleep(&input, next, (int64_t)sample.interval_us * 1000);
    }
    penstock_unmap(&output, output_fd);
    penstock_unmap(&input, input_fd);
    return 0;
}
