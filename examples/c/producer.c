/* Writes messages into a queue that exists.
 *
 *     cc -std=c11 -O2 -I include examples/c/producer.c -o producer
 *     penstock create fmq:/dev/shm/beams
 *     ./producer /dev/shm/beams.fmq 1000 256        1000 messages of 256 bytes
 *     ./producer /dev/shm/beams.fmq 0 256           until it is stopped
 *
 * A message is text, "PID NUMBER ", and dots up to its size. Many of these can write to one queue
 * at the same time if it was created with writers=many.
 */
#define _GNU_SOURCE
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include <penstock/ring.h>

static int fail(const char *path, const char *what, int error)
{
    fprintf(stderr, "producer: %s: %s%s%s\n", path, what, error ? ": " : "",
            error ? strerror(error) : "");
    return 1;
}

static const char *refusal(penstock_code code)
{
    switch (code) {
    case PENSTOCK_TOO_LARGE:
        return "the message is larger than the queue's buffer";
    case PENSTOCK_FULL:
        return "the queue is full, and nothing in it may be overwritten";
    case PENSTOCK_DAMAGED:
        return "the queue is damaged";
    case PENSTOCK_CLOSED:
        return "the queue was sealed, or replaced by another";
    case PENSTOCK_GUARDED:
        return "what it would overwrite was synced, and the disk does not answer";
    case PENSTOCK_REMOVED:
        return "the queue was removed: open the path again";
    case PENSTOCK_EMPTY:
        return "another writer kept the lock for 10 s";
    default:
        return "the message was refused";
    }
}

/* Why there is no writing to a queue. */
static const char *reason(int error)
{
    switch (error) {
    case EBUSY:
        return "another process writes to it";
    case EPIPE:
        return "it was sealed, or replaced by another";
    case EBADMSG:
        return "it is damaged";
    case EOPNOTSUPP:
        return "it is compressed or sparse, which is not for the header alone";
    case ENOTRECOVERABLE:
        return "the machine went down since it was written to: let penstock open it first";
    default:
        return strerror(error);
    }
}

/* Text in front, dots behind. */
static void fill(char *payload, uint64_t size, uint64_t number)
{
    char text[48];
    int length = snprintf(text, sizeof text, "%ld %" PRIu64 " ", (long)getpid(), number);
    uint64_t used = (uint64_t)length < size ? (uint64_t)length : size;
    memcpy(payload, text, used);
    memset(payload + used, '.', size - used);
}

int main(int argc, char **argv)
{
    if (argc != 4) {
        fprintf(stderr, "usage: producer FILE COUNT SIZE\n");
        return 2;
    }
    const char *path = argv[1];
    uint64_t count = strtoull(argv[2], NULL, 10), size = strtoull(argv[3], NULL, 10);

    penstock_ring ring;
    int fd;
    const char *fault = penstock_map(path, true, &ring, &fd);
    if (fault != NULL)
        return fail(path, fault, strcmp(fault, "open") == 0 || strcmp(fault, "map") == 0 ? errno : 0);

    penstock_writer writer;
    int error = penstock_writer_open(&writer, ring, fd);
    if (error != 0)
        return fail(path, reason(error), 0);

    char *payload = malloc(size > 0 ? size : 1);
    if (payload == NULL)
        return fail(path, "memory", errno);
    uint64_t written = 0;
    penstock_code code = PENSTOCK_OK;
    while (code == PENSTOCK_OK && (count == 0 || written < count)) {
        fill(payload, size, written);
        code = penstock_write(&writer, payload, size, 1, 0);
        written += code == PENSTOCK_OK;
    }
    free(payload);
    penstock_unmap(&ring, fd);
    printf("written=%" PRIu64 "\n", written);
    return code == PENSTOCK_OK ? 0 : fail(path, refusal(code), 0);
}
