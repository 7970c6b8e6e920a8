/* How fast are LROSE's system calls alone?
 *
 * A yardstick, not an implementation: it makes the system calls that LROSE's file queue makes for
 * each message, with bytes of the right form, and leaves out the thinking. It places messages of
 * one size round and round, follows no other writer and survives nothing.
 *
 *     lrose_syscalls write|read DIRECTORY COUNT SIZE SLOTS BUFFER [--full]
 *
 * write         lock, three writes (message, slot, status), unlock. It frees no slot.
 * write --full  LROSE's whole sequence on a full queue: lock, read status, read the oldest slot,
 *               free it, write message, slot and status, unlock; a seek before each.
 * read          reads of status, slot and message, with a check of cookies and id.
 * read --full   the same with a seek before each, as LROSE makes them.
 *
 * `write` makes DIRECTORY/queue.stat and .buf anew and fills them before it starts the clock;
 * `read` goes over such a queue, from its oldest message to its youngest, again and again.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { STATUS_MAGIC = 88008801, MESSAGE_MAGIC = 88008802 };
enum { FRAME_HEAD = 8, FRAME_EXTRA = 12 };

/* Big-endian words in the files; field order as in the spec of the format. */
typedef struct {
    uint32_t magic, youngest_id, youngest_slot, oldest_slot, nslots, buf_size;
    uint32_t begin_insert, end_insert, begin_append, append_mode;
    uint32_t time_written, blocking_write, last_id_read, checksum;
} Status;

typedef struct {
    uint32_t active, id, time, msg_len, stored_len, offset, type, subtype, compress, checksum;
} Slot;

typedef struct {
    int stat, buf;
    bool full; /* LROSE's own sequence, a seek before each read and write */
    uint32_t size, stored, slots, buffer;
    uint32_t held; /* messages that the queue holds when it is full */
    unsigned char *frame;
} Queue;

static void fail(const char *what)
{
    fprintf(stderr, "lrose_syscalls: %s: %s\n", what, errno ? strerror(errno) : "not as expected");
    exit(1);
}

static void swap(void *words, size_t bytes)
{
    uint32_t *w = words;
    for (size_t i = 0; i < bytes / 4; i++)
        w[i] = __builtin_bswap32(w[i]);
}

static void put_word(unsigned char *at, uint32_t word)
{
    swap(&word, sizeof word);
    memcpy(at, &word, sizeof word);
}

static uint32_t word_at(const unsigned char *at)
{
    uint32_t word;
    memcpy(&word, at, sizeof word);
    return __builtin_bswap32(word);
}

static off_t slot_offset(uint32_t slot) { return (off_t)(sizeof(Status) + sizeof(Slot) * slot); }

/* --- system calls --------------------------------------------------------------------------- */

static void write_at(const Queue *q, int fd, const void *from, size_t n, off_t at)
{
    ssize_t put = -1;
    if (!q->full)
        put = pwrite(fd, from, n, at);
    else if (lseek(fd, at, SEEK_SET) == at)
        put = write(fd, from, n);
    if (put != (ssize_t)n)
        fail("write");
}

static void read_at(const Queue *q, int fd, void *to, size_t n, off_t at)
{
    ssize_t got = -1;
    if (!q->full)
        got = pread(fd, to, n, at);
    else if (lseek(fd, at, SEEK_SET) == at)
        got = read(fd, to, n);
    if (got != (ssize_t)n)
        fail("read");
}

static void set_lock(const Queue *q, short kind)
{
    struct flock whole = {.l_type = kind, .l_whence = SEEK_SET};
    if (fcntl(q->stat, F_SETLK, &whole) != 0)
        fail("lock");
}

/* --- one message ---------------------------------------------------------------------------- */

static void write_message(Queue *q, uint32_t n)
{
    uint32_t index = n % q->slots, place = n % q->held, now = (uint32_t)time(NULL);
    uint32_t oldest = n < q->held ? 0 : (n - q->held + 1) % q->slots;
    set_lock(q, F_WRLCK);
    if (q->full) {
        Status status;
        Slot slot, free_slot = {.checksum = (uint32_t)-4};
        read_at(q, q->stat, &status, sizeof status, 0);
        swap(&status, sizeof status);
        if (status.magic != STATUS_MAGIC)
            fail("status");
        if (n >= q->held) {
            read_at(q, q->stat, &slot, sizeof slot, slot_offset(status.oldest_slot));
            swap(&slot, sizeof slot);
            if (slot.active != 1 || slot.offset != status.end_insert)
                fail("oldest slot");
            swap(&free_slot, sizeof free_slot);
            write_at(q, q->stat, &free_slot, sizeof free_slot, slot_offset(status.oldest_slot));
        }
    }
    Slot slot = {.active = 1, .id = n, .time = now, .msg_len = q->size, .stored_len = q->stored,
                 .offset = place * q->stored};
    slot.checksum = slot.active + ~slot.id + slot.time + ~slot.msg_len + slot.stored_len +
                    slot.offset + ~slot.type + slot.subtype + ~slot.compress;
    off_t offset = slot.offset;
    swap(&slot, sizeof slot);
    put_word(q->frame + 4, index);
    put_word(q->frame + q->stored - 4, n);

    uint32_t end = q->held * q->stored, next = (place + 1) % q->held * q->stored;
    bool appending = n < q->held || next == 0; /* before the first message is overwritten */
    Status s = {.magic = STATUS_MAGIC, .youngest_id = n, .youngest_slot = index,
                .oldest_slot = oldest, .nslots = q->slots, .buf_size = q->buffer,
                .begin_insert = appending ? 0 : next, .end_insert = appending ? 0 : next,
                .begin_append = n < q->held ? (place + 1) * q->stored : end,
                .append_mode = appending, .time_written = now};
    s.checksum = s.magic + ~s.youngest_id + s.youngest_slot + ~s.oldest_slot + s.nslots +
                 s.buf_size + ~s.begin_insert + s.end_insert + ~s.begin_append + s.append_mode +
                 s.time_written + ~s.blocking_write;
    swap(&s, sizeof s);

    write_at(q, q->buf, q->frame, q->stored, offset);
    write_at(q, q->stat, &slot, sizeof slot, slot_offset(index));
    write_at(q, q->stat, &s, sizeof s, 0);
    set_lock(q, F_UNLCK);
}

/* Read the message behind `last_id`, or the oldest one after the youngest was read. */
static uint32_t read_message(Queue *q, uint32_t last_id, uint32_t *index)
{
    Status status;
    Slot slot;
    read_at(q, q->stat, &status, sizeof status, 0);
    swap(&status, sizeof status);
    if (status.magic != STATUS_MAGIC)
        fail("status");
    bool again = last_id == status.youngest_id;
    *index = again ? status.oldest_slot : (*index + 1) % status.nslots;
    read_at(q, q->stat, &slot, sizeof slot, slot_offset(*index));
    swap(&slot, sizeof slot);
    if (slot.active != 1 || slot.stored_len != q->stored || (!again && slot.id != last_id + 1))
        fail("slot");
    read_at(q, q->buf, q->frame, slot.stored_len, slot.offset);
    if (word_at(q->frame) != MESSAGE_MAGIC || word_at(q->frame + 4) != *index ||
        word_at(q->frame + slot.stored_len - 4) != slot.id)
        fail("message");
    return slot.id;
}

/* --- the program ---------------------------------------------------------------------------- */

static int open_part(const char *directory, const char *name, int flags)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", directory, name);
    int fd = open(path, flags, 0666);
    if (fd < 0)
        fail(path);
    return fd;
}

/* A queue full of messages, so that what is timed meets no hole in a file. */
static void fill(Queue *q)
{
    Slot free_slot = {.checksum = (uint32_t)-4};
    swap(&free_slot, sizeof free_slot);
    for (uint32_t i = 0; i < q->slots; i++)
        write_at(q, q->stat, &free_slot, sizeof free_slot, slot_offset(i));
    Status empty = {.magic = STATUS_MAGIC};
    swap(&empty, sizeof empty);
    write_at(q, q->stat, &empty, sizeof empty, 0);
    if (ftruncate(q->buf, q->buffer) != 0)
        fail("ftruncate");
    for (uint32_t n = 0; n < q->held; n++)
        write_message(q, n);
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

int main(int argc, char **argv)
{
    bool full = argc == 8 && strcmp(argv[7], "--full") == 0;
    bool writes = argc > 1 && strcmp(argv[1], "write") == 0;
    bool reads = argc > 1 && strcmp(argv[1], "read") == 0;
    if ((argc != 7 && !full) || (!writes && !reads)) {
        fprintf(stderr, "lrose_syscalls write|read DIRECTORY COUNT SIZE SLOTS BUFFER [--full]\n");
        return 2;
    }
    uint32_t count = (uint32_t)strtoul(argv[3], NULL, 10);
    Queue q = {.full = full, .size = (uint32_t)strtoul(argv[4], NULL, 10),
               .slots = (uint32_t)strtoul(argv[5], NULL, 10),
               .buffer = (uint32_t)strtoul(argv[6], NULL, 10)};
    q.stored = ((q.size + 3) & ~3u) + FRAME_EXTRA;
    q.held = q.slots < q.buffer / q.stored ? q.slots : q.buffer / q.stored;
    q.frame = calloc(1, q.stored);
    if (count == 0 || q.held == 0 || q.frame == NULL)
        fail("arguments");
    memset(q.frame + FRAME_HEAD, 'x', q.size);
    put_word(q.frame, MESSAGE_MAGIC);

    int flags = writes ? O_RDWR | O_CREAT | O_TRUNC : O_RDONLY;
    q.stat = open_part(argv[2], "queue.stat", flags);
    q.buf = open_part(argv[2], "queue.buf", flags);
    double began, seconds;
    if (writes) {
        fill(&q);
        began = now();
        for (uint32_t n = 0; n < count; n++)
            write_message(&q, q.held + n);
        seconds = now() - began;
    } else {
        Status status;
        read_at(&q, q.stat, &status, sizeof status, 0);
        swap(&status, sizeof status);
        uint32_t last_id = status.youngest_id, index = 0;
        began = now();
        for (uint32_t n = 0; n < count; n++)
            last_id = read_message(&q, last_id, &index);
        seconds = now() - began;
    }
    printf("{\"messages\": %u, \"seconds\": %.6f, \"messages_per_second\": %.0f}\n", count, seconds,
           count / seconds);
    return 0;
}
