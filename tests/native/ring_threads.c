/* Does the ring keep its promises when writers and readers run at the same time?
 *
 *     ring_threads hold|lap|many SECONDS
 *
 * hold: one writer that waits for three readers: they get every message, whole, in order.
 * lap:  one writer that waits for nobody: what they do not get, they count.
 * many: three writers that take turns, some of whom leave without giving the lock back, and three
 *       readers that they wait for: every message of every writer, whole, in its order.
 *
 * Threads over one mapping, so that ThreadSanitizer sees who reads what another one writes. With
 * -DREVERSED the one writer publishes messages before their bytes are in place: that has to be
 * found out.
 */
#define _GNU_SOURCE
#include <penstock/ring.h>

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

enum { SLOTS = 64, BUFFER = 1 << 16, LARGEST = 40000, READERS = 3, WRITERS = 3, RUNNERS = 8 };
/* The last message has this type, which is not asked whether it is whole. */
enum { LAST = -1 };

static penstock_ring ring;
static int file;
static double seconds;
static bool holding;
/* Most payloads are shorter than the one, all than the other. Where readers are overtaken, nearly
 * every word that is copied is a race for the sanitizer to look at: there they are short. */
static uint32_t small = 300, large = LARGEST;

static void fail(const char *what, uint64_t seq) {
    fprintf(stderr, "FAILED: %s at message %llu\n", what, (unsigned long long)seq);
    _exit(1); /* at once: the other threads are still at work */
}

static double now(void) { return (double)penstock_clock(CLOCK_MONOTONIC) / 1e9; }

static void make_ring(uint32_t flags) {
    uint64_t size = penstock_buffer_offset(READERS, SLOTS) + BUFFER;
    file = memfd_create("ring", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, (off_t)size) != 0)
        fail("no memory", 0);
    penstock_header *h = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (h == MAP_FAILED)
        fail("no mapping", 0);
    h->magic = PENSTOCK_MAGIC;
    h->version = PENSTOCK_VERSION;
    h->flags = flags;
    h->epoch = 1;
    h->slots = SLOTS;
    h->buffer_size = BUFFER;
    h->readers = READERS;
    h->slots_offset = penstock_slots_offset(READERS);
    h->buffer_offset = penstock_buffer_offset(READERS, SLOTS);
    h->file_size = size;
    if (penstock_header_fault(h, size) != NULL)
        fail(penstock_header_fault(h, size), 0);
    ring = penstock_over(h, true);
}

/* --- messages -------------------------------------------------------------------------------- */

typedef struct {
    uint32_t state;
    uint64_t payload[LARGEST / 8];
} maker;

static uint32_t next_random(maker *m) {
    m->state ^= m->state << 13;
    m->state ^= m->state >> 17;
    m->state ^= m->state << 5;
    return m->state;
}

/* Fill in another payload, and return its length: most are small, some are not, some are nothing. */
static uint32_t make(maker *m) {
    uint32_t kind = next_random(m) % 8, length = 0;
    if (kind > 0)
        length = next_random(m) % (kind < 7 ? small : large);
    for (uint32_t i = 0; i < (length + 7) / 8; i++)
        m->payload[i] = (uint64_t)next_random(m) * 0x9E3779B97F4A7C15ull;
    return length;
}

/* The type of a message is the checksum of its payload and its number. */
static int32_t checksum(int32_t number, const void *payload, uint64_t length) {
    uint32_t crc = penstock_crc32c((uint32_t)number, payload, length);
    return (int32_t)(crc & INT32_MAX);
}

static penstock_code put(penstock_writer *w, const void *payload, uint64_t length, int32_t type,
                         int32_t number) {
#ifdef REVERSED
    uint8_t *to;
    penstock_code code = penstock_begin(w, length, &to);
    if (code != PENSTOCK_OK)
        return code;
    penstock_slot slot;
    memset(&slot, 0, sizeof slot);
    slot.length = length;
    slot.type = type;
    slot.subtype = number;
    penstock_finish(w, &slot);
    penstock_publish(w);
    penstock_copy(to, payload, length);
    return PENSTOCK_OK;
#else
    return penstock_write(w, payload, length, type, number);
#endif
}

/* Append, and wait for held readers as long as it takes. */
static void append(penstock_writer *w, const void *payload, uint64_t length, int32_t type, int32_t number) {
    penstock_code code;
    while ((code = put(w, payload, length, type, number)) != PENSTOCK_OK) {
        if (code != PENSTOCK_FULL)
            fail("a message was refused", w->head);
        penstock_sleep_for_room(w, 10000000);
    }
}

static void open_writer(penstock_writer *w) {
    char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", file);
    int fd = open(path, O_RDWR | O_CLOEXEC); /* whose locks are its own */
    int error = fd < 0 ? errno : penstock_writer_open(w, ring, fd);
    if (error != 0)
        fail(strerror(error), 0);
    if (holding) {
        for (uint32_t i = 0; i < READERS; i++)
            w->held[i] = i;
        w->held_count = READERS;
        w->holders = ring.header->holders;
        w->holding = true;
        w->limit = penstock_held(w);
    }
}

/* --- the threads ----------------------------------------------------------------------------- */

typedef struct {
    pthread_t thread;
    uint32_t index;
    uint64_t messages, lost;
} runner;

static void *write_messages(void *argument) {
    runner *self = argument;
    penstock_writer w;
    maker *m = calloc(1, sizeof *m);
    m->state = 12345 + self->index;
    open_writer(&w);
    double end = now() + seconds;
    for (int32_t count = 0; now() < end && count < 1 << 24; count++) {
        uint32_t length = make(m);
        int32_t number = (int32_t)(self->index << 24) + count;
        append(&w, m->payload, length, checksum(number, m->payload, length), number);
        self->messages++;
    }
    close(w.fd);
    free(m);
    return NULL;
}

/* Take the lock again and again, and leave with it as one that was killed does. */
static void *die_with_lock(void *argument) {
    runner *self = argument;
    for (double end = now() + seconds; now() < end; usleep(20000)) {
        penstock_writer w;
        open_writer(&w);
        if (penstock_lock(&w, 10000000000) != 0)
            fail("the lock does not come", 0);
        close(w.fd);
        self->messages++;
    }
    return NULL;
}

/* Wait for a message: every other reader as one who waits for many queues does. */
static void wait_for(uint32_t reader, uint64_t seq) {
    if (reader % 2 == 0) {
        penstock_sleep(&ring, seq, 100000000);
        return;
    }
    uint32_t bell = 0;
    penstock_sleeper sleeper;
    penstock_sleeper_init(&sleeper, &bell);
    penstock_sleeper_add(&sleeper, &ring, seq);
    int error = penstock_sleeper_sleep(&sleeper, penstock_clock(CLOCK_MONOTONIC) + 100000000);
    if (error == ENOSYS)
        usleep(100);
}

static void *read_messages(void *argument) {
    runner *self = argument;
    uint8_t *payload = malloc(LARGEST);
    int32_t latest[WRITERS];
    memset(latest, 0xFF, sizeof latest);
    penstock_slot slot;
    slot.type = 0;
    for (uint64_t seq = 0; slot.type != LAST;) {
        penstock_code code = penstock_read(&ring, seq, &slot, payload, LARGEST);
        if (code == PENSTOCK_EMPTY) {
            slot.type = 0;
            wait_for(self->index, seq);
            continue;
        }
        if (code == PENSTOCK_LAPPED && !holding) {
            uint64_t oldest = penstock_tail(&ring);
            self->lost += oldest - seq;
            seq = oldest;
            slot.type = 0;
            continue;
        }
        if (code != PENSTOCK_OK)
            fail(code == PENSTOCK_LAPPED ? "a held reader was overtaken" : "damage", seq);
        if (slot.type != LAST) {
            if (checksum(slot.subtype, payload, slot.length) != slot.type)
                fail("bad checksum", seq);
            uint32_t writer = (uint32_t)slot.subtype >> 24;
            int32_t count = slot.subtype & 0xFFFFFF;
            if (holding ? count != latest[writer] + 1 : count <= latest[writer])
                fail("out of order", seq);
            latest[writer] = count;
        }
        self->messages++;
        seq++;
        if (holding)
            penstock_acknowledge(&ring, self->index, seq);
    }
    free(payload);
    return NULL;
}

static runner runners[RUNNERS];
static uint32_t started;

static runner *start(void *(*run)(void *), uint32_t index) {
    runner *r = &runners[started++];
    r->index = index;
    if (pthread_create(&r->thread, NULL, run, r) != 0)
        fail("no thread", 0);
    return r;
}

int main(int count, char **arguments) {
    const char *mode = count == 3 ? arguments[1] : "";
    bool many = strcmp(mode, "many") == 0;
    holding = many || strcmp(mode, "hold") == 0;
    if (!holding && strcmp(mode, "lap") != 0) {
        fprintf(stderr, "usage: ring_threads hold|lap|many SECONDS\n");
        return 2;
    }
    seconds = atof(arguments[2]);
    if (!holding)
        small = 40, large = 3000;
    make_ring(many ? PENSTOCK_MANY_WRITERS : 0);
    runner *readers[READERS], *writers[WRITERS];
    for (uint32_t i = 0; i < READERS; i++)
        readers[i] = start(read_messages, i);
    uint32_t writer_count = many ? WRITERS : 1;
    for (uint32_t i = 0; i < writer_count; i++)
        writers[i] = start(write_messages, i);
    runner *dying = many ? start(die_with_lock, 0) : NULL;
    uint64_t written = 1;
    for (uint32_t i = 0; i < writer_count; i++) {
        pthread_join(writers[i]->thread, NULL);
        written += writers[i]->messages;
    }
    if (dying != NULL)
        pthread_join(dying->thread, NULL);
    penstock_writer w;
    open_writer(&w);
    append(&w, "the end", 7, LAST, 0);
    uint64_t lost = 0;
    for (uint32_t i = 0; i < READERS; i++) {
        pthread_join(readers[i]->thread, NULL);
        if (readers[i]->messages + readers[i]->lost != written)
            fail("the books do not add up", readers[i]->messages);
        lost += readers[i]->lost;
    }
    printf("%s: %llu written, %llu lost by %d readers, %llu died with the lock\n", mode,
           (unsigned long long)written, (unsigned long long)lost, READERS,
           (unsigned long long)(dying == NULL ? 0 : dying->messages));
    return 0;
}
