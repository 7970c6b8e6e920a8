/* Follows a queue, from the oldest message on, and says what came.
 *
 *     cc -std=c11 -O2 -I include examples/c/consumer.c -o consumer
 *     ./consumer /dev/shm/beams.fmq 1000 2.5
 *
 * It ends after that many messages (0: never), or when none came for that many seconds, or when
 * the queue is sealed or removed. crc32c is that of all payloads, one behind the other, as they are stored.
 */
#define _GNU_SOURCE
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include <penstock/ring.h>

#define SECOND 1000000000ll

typedef struct {
    uint8_t *bytes;
    uint64_t room;
    uint64_t messages, payload_bytes, lost, damaged, next;
    uint32_t crc;
} consumer;

/* Copy message `next`, block and payload. Whether the copy is whole is known only afterwards. */
static penstock_code take(consumer *c, const penstock_ring *ring)
{
    if (c->next >= penstock_head(ring))
        return PENSTOCK_EMPTY;
    penstock_slot slot;
    penstock_code code = penstock_slot_of(ring, c->next, &slot);
    if (code != PENSTOCK_OK)
        return code;
    uint64_t size = slot.block + slot.length; /* checked: not more than the buffer has */
    if (size > c->room) {
        uint8_t *more = realloc(c->bytes, size);
        if (more == NULL)
            return PENSTOCK_TOO_LARGE;
        c->bytes = more;
        c->room = size;
    }
    if (size > 0)
        penstock_copy(c->bytes, penstock_bytes(ring, &slot), size);
    if (!penstock_still_there(ring, c->next))
        return PENSTOCK_LAPPED;
    if (slot.flags & PENSTOCK_HAS_CRC && slot.crc32c != penstock_message_crc(&slot, c->bytes))
        return PENSTOCK_DAMAGED;
    c->messages++;
    c->payload_bytes += slot.length;
    if (slot.length > 0)
        c->crc = penstock_crc32c(c->crc, c->bytes + slot.block, slot.length);
    return PENSTOCK_OK;
}

static int64_t now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * SECOND + time.tv_nsec;
}

/* Take what comes, until there is nothing more to wait for. Returns 0, or an errno. */
static int follow(consumer *c, const penstock_ring *ring, int fd, uint64_t count, int64_t patience)
{
    int64_t idle_since = now(), removed_at = 0;
    while (count == 0 || c->messages < count) {
        penstock_code code = take(c, ring);
        if (code == PENSTOCK_EMPTY) {
            if (removed_at == 0 && penstock_is_removed(fd))
                removed_at = now();
            /* A writer notices within a second that the queue was removed. */
            bool is_over = penstock_state(ring->header) != PENSTOCK_LIVE ||
                           (removed_at != 0 && now() - removed_at > 2 * SECOND);
            if (is_over && c->next >= penstock_head(ring))
                return 0;
            int64_t left = idle_since + patience - now();
            if (left <= 0)
                return 0;
            int error = penstock_sleep(ring, c->next, left < SECOND ? left : SECOND);
            if (error != 0 && error != ETIMEDOUT && error != EINTR)
                return error;
            continue;
        }
        if (code == PENSTOCK_TOO_LARGE)
            return ENOMEM;
        if (code == PENSTOCK_LAPPED) { /* go on at the oldest that is there */
            uint64_t oldest = penstock_tail(ring);
            c->lost += oldest - c->next;
            c->next = oldest;
        } else {
            c->damaged += code == PENSTOCK_DAMAGED;
            c->next++;
        }
        if (c->next >= penstock_head(ring))
            idle_since = now();
    }
    return 0;
}

int main(int argc, char **argv)
{
    if (argc != 4) {
        fprintf(stderr, "usage: consumer FILE COUNT IDLE_SECONDS\n");
        return 2;
    }
    const char *path = argv[1];
    uint64_t count = strtoull(argv[2], NULL, 10);
    int64_t patience = (int64_t)(strtod(argv[3], NULL) * SECOND);

    /* Who may write to the file can sleep until a message comes; others look every 2 ms. */
    penstock_ring ring;
    int fd;
    const char *fault = penstock_map(path, true, &ring, &fd);
    if (fault != NULL && strcmp(fault, "open") == 0 && (errno == EACCES || errno == EROFS))
        fault = penstock_map(path, false, &ring, &fd);
    if (fault != NULL) {
        bool system = strcmp(fault, "open") == 0 || strcmp(fault, "map") == 0;
        fprintf(stderr, "consumer: %s: %s: %s\n", path, fault, system ? strerror(errno) : "not right");
        return 1;
    }

    consumer c = {0};
    uint64_t first = c.next = penstock_tail(&ring);
    int error = follow(&c, &ring, fd, count, patience);
    printf("first=%" PRIu64 " next=%" PRIu64 " messages=%" PRIu64 " bytes=%" PRIu64 " lost=%" PRIu64
           " damaged=%" PRIu64 " crc32c=%08" PRIx32 "\n",
           first, c.next, c.messages, c.payload_bytes, c.lost, c.damaged, c.crc);
    if (error != 0)
        fprintf(stderr, "consumer: %s: %s\n", path, strerror(error));
    free(c.bytes);
    penstock_unmap(&ring, fd);
    return error != 0;
}
