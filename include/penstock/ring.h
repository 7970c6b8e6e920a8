/* penstock/ring.h - the wide Fast Message Queue, version 1, for C11 and C++17 on Linux.
 *
 * This header is all that a producer or a consumer needs; penstock's own core is built on it.
 * docs/queue-format.md explains the same format. A queue is one mapped file (on disk, in /dev/shm,
 * or a memfd), little-endian:
 *
 *     header         4096 bytes
 *     reader table   `readers` entries of 128 bytes, padded to a multiple of 4096
 *     slot table     `slots` entries of 64 bytes; `slots` is a power of two
 *     buffer         `buffer_size` bytes, a multiple of 4096
 *
 * Message number s is in slot s % slots. Its bytes start at buffer offset position % buffer_size
 * and are contiguous. The queue holds the messages tail .. head-1.
 *
 * Order of the writer's stores, and what a reader may conclude from it:
 *     1. tail    then a release fence    what is below tail may be overwritten from now on
 *     2. the bytes and slots of the new messages
 *     3. head    with release            a load of head with acquire sees all of 2
 * A reader copies; then, after an acquire fence, it loads tail. If its message is not below
 * tail, the copy is intact. Aligned 64-bit loads and stores are atomic on every supported
 * machine.
 */
#ifndef PENSTOCK_RING_H
#define PENSTOCK_RING_H

#ifndef _GNU_SOURCE
#error "define _GNU_SOURCE before the first include: the liveness locks need it"
#endif

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__ || __SIZEOF_POINTER__ != 8
#error "the wide queue needs a little-endian 64-bit machine"
#endif

#define PENSTOCK_MAGIC 0x31474E49524E4550ull /* "PENRING1" */
#define PENSTOCK_VERSION 1u
#define PENSTOCK_PAGE 4096u
#define PENSTOCK_READER_SIZE 128u
#define PENSTOCK_SLOT_SIZE 64u
#define PENSTOCK_ALIGN 64u /* alignment of messages */
#define PENSTOCK_HELD_MAX 128u /* most readers that a writer can wait for */
#define PENSTOCK_SLEEP_MAX 128 /* most futexes of one sleep: 127 queues and the bell */
#define PENSTOCK_SECOND 1000000000ll
#define PENSTOCK_SPIN 20000 /* ns to spin before sleeping: about the cost of going to sleep */

/* Header flags. */
#define PENSTOCK_WITH_CRC 1u     /* every message has its crc32c */
#define PENSTOCK_MANY_WRITERS 2u /* writers take the lock of the header in turns */
#define PENSTOCK_SPARSE 4u       /* disk space is allocated as messages arrive */
#define PENSTOCK_KEEPS 8u        /* nothing is overwritten: a segment of a log */

/* Header states. */
#define PENSTOCK_LIVE 0u
#define PENSTOCK_SEALED 1u   /* takes no more messages */
#define PENSTOCK_REPLACED 2u /* the path names another queue */

/* Slot flags. */
#define PENSTOCK_HAS_STREAM 1u     /* the block begins with 16 bytes of another stream id */
#define PENSTOCK_HAS_ATTRIBUTES 2u /* then come the attributes */
#define PENSTOCK_HAS_CRC 4u
#define PENSTOCK_HAS_ORIGIN 8u /* the block ends with the time of a copy's first append */

/* Every reader and writer holds an exclusive OFD lock on a byte far past the end of the file. The
 * kernel releases it when the process ends, so an unlocked byte means that its owner is gone. */
#define PENSTOCK_LIVE_READER (1ull << 62)             /* + index in the reader table */
#define PENSTOCK_LIVE_WRITER ((1ull << 62) + (1u << 24)) /* + number of the writer, 0: the only one */

typedef enum {
    PENSTOCK_OK,
    PENSTOCK_EMPTY,     /* there is no such message yet */
    PENSTOCK_LAPPED,    /* it was overwritten */
    PENSTOCK_DAMAGED,   /* it fails its checks */
    PENSTOCK_TOO_LARGE, /* it does not fit into the buffer, or into the reader's memory */
    PENSTOCK_FULL,      /* a held reader still needs messages that would be overwritten */
    PENSTOCK_CHANGED,   /* named readers joined or left: update `held` */
    PENSTOCK_NO_SPACE,  /* a sparse queue needs disk space there first */
    PENSTOCK_CLOSED,    /* the queue was sealed or replaced: it takes no more */
    PENSTOCK_GUARDED,   /* synced messages would be overwritten: sync a new guard first */
    PENSTOCK_REMOVED    /* the file was removed, or another took its name: open the path again */
} penstock_code;

typedef struct {
    /* Constant after creation, except by recovery. */
    uint64_t magic;
    uint32_t version;
    uint32_t flags;
    uint64_t epoch; /* random; new for every created or recovered queue */
    uint64_t slots;
    uint64_t buffer_size;
    uint32_t readers;
    uint32_t compression; /* of every payload: 0 none, 1 lz4 frame, 2 zstd */
    uint64_t slots_offset;
    uint64_t buffer_offset;
    uint64_t file_size;
    uint8_t stream[16]; /* the queue's own stream id; zeros: none */
    int64_t created_ns;
    uint64_t first_seq; /* number of the first message that was ever in it */
    uint32_t check;     /* at 104: crc32c of the fields before it, and of `lineage`; 0: none */
    uint8_t unused_1[20];
    /* Variable fields, on cache lines of their own, because other processes poll them. */
    uint64_t head; /* at 128: number of the next message */
    uint8_t unused_2[56];
    uint64_t tail; /* at 192: number of the oldest message */
    uint8_t unused_3[56];
    uint32_t sleeping; /* at 256: 1 when a reader sleeps, or may */
    uint32_t wakes;    /* the futex that it sleeps on */
    uint8_t unused_4[56];
    uint32_t room_wanted; /* at 320: 1 when a writer sleeps until a held reader moves, or may */
    uint32_t room_wakes;  /* the futex that it sleeps on */
    uint32_t holders;     /* incremented when a named reader joins or leaves */
    uint8_t unused_5[52];
    uint32_t lock;        /* at 384: number of the writer that has the lock; top bit: some wait */
    uint32_t next_writer; /* the number assigned last */
    uint32_t writer_pid;  /* for information only */
    uint32_t state;
    uint8_t boot_id[16];  /* of the boot in which it was written last; zeros: all is synced */
    uint64_t state_check; /* at 416: the state, and its complement above it; 0: none */
    uint64_t guard;       /* messages from here on are not overwritten; 0: no such promise */
    uint64_t guard_next;  /* `guard` after the current sync; without a guard: the end of the messages
                           * on disk when it was dropped */
    uint64_t head_check;  /* `head`, stored after it, and so never above it; 0: none */
    uint64_t lineage[8]; /* at 448: earlier epochs, and the end of each */
    int64_t source_least; /* at 512: of a sealed segment: the range of its messages' time_ns */
    int64_t source_greatest;
    uint64_t source_check; /* crc32c of these two, with bit 32 set; otherwise not recorded */
    int64_t origin_least; /* at 536: the same for origin_ns */
    int64_t origin_greatest;
    uint64_t origin_check;
    uint8_t unused_6[PENSTOCK_PAGE - 560];
} penstock_header;

typedef struct {
    uint32_t state; /* 0 free, 1 named, 2 passing */
    uint32_t pid;
    uint64_t epoch;
    uint64_t position; /* number of the next message to read */
    int64_t updated_ns;
    char name[88];  /* zero-terminated; more than 87 bytes continue in `check` */
    uint64_t check; /* at 120: of position, epoch and name; 0: none */
} penstock_reader_entry;

typedef struct {
    uint64_t seq;
    int64_t time_ns;    /* when it happened */
    int64_t created_ns; /* when it was appended; never decreases */
    uint64_t position;  /* of its first byte, counted since the creation of the queue */
    uint64_t length;    /* bytes of the payload, as stored */
    int32_t type, subtype;
    uint32_t flags;
    uint32_t block;      /* bytes before the payload: stream, attributes, padding to a multiple of 8, origin */
    uint32_t attributes; /* bytes of the attributes */
    uint32_t crc32c;     /* of the 60 bytes before it, then block and payload */
} penstock_slot;

#ifdef __cplusplus
#define PENSTOCK_ASSERT static_assert
#else
#define PENSTOCK_ASSERT _Static_assert
#endif
PENSTOCK_ASSERT(sizeof(penstock_header) == PENSTOCK_PAGE, "layout");
PENSTOCK_ASSERT(sizeof(penstock_slot) == PENSTOCK_SLOT_SIZE, "layout");
PENSTOCK_ASSERT(sizeof(penstock_reader_entry) == PENSTOCK_READER_SIZE, "layout");
PENSTOCK_ASSERT(offsetof(penstock_header, head) == 128, "layout");
PENSTOCK_ASSERT(offsetof(penstock_header, tail) == 192, "layout");
PENSTOCK_ASSERT(offsetof(penstock_header, sleeping) == 256, "layout");
PENSTOCK_ASSERT(offsetof(penstock_header, room_wanted) == 320, "layout");
PENSTOCK_ASSERT(offsetof(penstock_header, lock) == 384, "layout");
PENSTOCK_ASSERT(offsetof(penstock_header, state_check) == 416, "layout");
PENSTOCK_ASSERT(offsetof(penstock_header, head_check) == 440, "layout");
PENSTOCK_ASSERT(offsetof(penstock_header, lineage) == 448, "layout");
PENSTOCK_ASSERT(offsetof(penstock_header, source_least) == 512, "layout");

#ifdef __cplusplus
extern "C" {
#endif

/* A test build defines this, to kill the process at each of these points in turn. */
#ifndef PENSTOCK_FAULT_POINT
#define PENSTOCK_FAULT_POINT() ((void)0)
#endif

/* --- crc32c ---------------------------------------------------------------------------------- */

#if defined(__x86_64__)
#define PENSTOCK_CRC_TARGET "sse4.2"
static inline bool penstock_crc_is_native(void) { return __builtin_cpu_supports("sse4.2"); }
#define PENSTOCK_CRC_WORD(crc, word) ((uint32_t)__builtin_ia32_crc32di(crc, word))
#define PENSTOCK_CRC_BYTE(crc, byte) __builtin_ia32_crc32qi(crc, byte)
#elif defined(__aarch64__) && defined(__GNUC__)
#if defined(__clang__)
#define PENSTOCK_CRC_TARGET "crc"
#else
#define PENSTOCK_CRC_TARGET "+crc"
#endif
/* Whether the processor has the instruction (HWCAP_CRC32); cached. */
static inline bool penstock_crc_is_native(void) {
#if defined(__ARM_FEATURE_CRC32)
    return true;
#else
    static int known = -1;
    int is = __atomic_load_n(&known, __ATOMIC_RELAXED);
    if (is < 0)
        __atomic_store_n(&known, is = (getauxval(AT_HWCAP) & (1ul << 7)) != 0, __ATOMIC_RELAXED);
    return is;
#endif
}
#if defined(__clang__)
#define PENSTOCK_CRC_WORD(crc, word) __builtin_arm_crc32cd(crc, word)
#define PENSTOCK_CRC_BYTE(crc, byte) __builtin_arm_crc32cb(crc, byte)
#else
#define PENSTOCK_CRC_WORD(crc, word) __builtin_aarch64_crc32cx(crc, word)
#define PENSTOCK_CRC_BYTE(crc, byte) __builtin_aarch64_crc32cb(crc, byte)
#endif
#endif

#if defined(PENSTOCK_CRC_TARGET)
__attribute__((target(PENSTOCK_CRC_TARGET))) static inline uint32_t penstock_crc_native(uint32_t crc,
                                                                                       const uint8_t *p,
                                                                                       size_t n) {
    for (; n >= 8; n -= 8, p += 8) {
        uint64_t word;
        memcpy(&word, p, 8);
        crc = PENSTOCK_CRC_WORD(crc, word);
    }
    for (; n > 0; n--)
        crc = PENSTOCK_CRC_BYTE(crc, *p++);
    return crc;
}
#endif

/* Without a processor instruction: eight bytes at a time, by tables that are computed once. Two threads
 * that compute them concurrently store the same values. */
static inline uint32_t penstock_crc_portable(uint32_t crc, const uint8_t *p, size_t n) {
    static uint32_t tables[8][256];
    static bool ready;
    if (!__atomic_load_n(&ready, __ATOMIC_ACQUIRE)) {
        for (uint32_t i = 0; i < 256; i++) {
            uint32_t entry = i;
            for (int bit = 0; bit < 8; bit++)
                entry = entry >> 1 ^ (entry & 1 ? 0x82F63B78u : 0);
            __atomic_store_n(&tables[0][i], entry, __ATOMIC_RELAXED);
            for (int t = 1; t < 8; t++) {
                uint32_t low = entry & 255, known = low;
                for (int bit = 0; bit < 8; bit++)
                    known = known >> 1 ^ (known & 1 ? 0x82F63B78u : 0);
                entry = entry >> 8 ^ known;
                __atomic_store_n(&tables[t][i], entry, __ATOMIC_RELAXED);
            }
        }
        __atomic_store_n(&ready, true, __ATOMIC_RELEASE);
    }
    for (; n >= 8; n -= 8, p += 8) {
        uint64_t word;
        memcpy(&word, p, 8);
        word ^= crc;
        crc = 0;
        for (int t = 0; t < 8; t++)
            crc ^= tables[7 - t][word >> 8 * t & 255];
    }
    for (; n > 0; n--)
        crc = crc >> 8 ^ tables[0][(crc ^ *p++) & 255];
    return crc;
}

/* Continue a crc32c (Castagnoli) over more bytes; start with 0. */
static inline uint32_t penstock_crc32c(uint32_t crc, const void *bytes, size_t n) {
#if defined(PENSTOCK_CRC_TARGET)
    if (penstock_crc_is_native())
        return ~penstock_crc_native(~crc, (const uint8_t *)bytes, n);
#endif
    return ~penstock_crc_portable(~crc, (const uint8_t *)bytes, n);
}

/* --- the mapped queue ------------------------------------------------------------------------ */

typedef struct {
    penstock_header *header;
    penstock_reader_entry *readers;
    penstock_slot *slots;
    uint8_t *buffer;
    uint64_t mask; /* slots - 1 */
    uint64_t buffer_size;
    uint32_t crc;  /* PENSTOCK_HAS_CRC, if every message has it */
    bool writable; /* false: poll, because a sleeper must set a flag */
} penstock_ring;

static inline uint64_t penstock_align(uint64_t n, uint64_t to) { return (n + to - 1) & ~(to - 1); }

/* Offsets of the slot table and the buffer. */
static inline uint64_t penstock_slots_offset(uint32_t readers) {
    return PENSTOCK_PAGE + penstock_align((uint64_t)readers * PENSTOCK_READER_SIZE, PENSTOCK_PAGE);
}

static inline uint64_t penstock_buffer_offset(uint32_t readers, uint64_t slots) {
    return penstock_align(penstock_slots_offset(readers) + slots * PENSTOCK_SLOT_SIZE, PENSTOCK_PAGE);
}

/* The checksum of the header fields that only recovery changes. Never 0. */
static inline uint32_t penstock_header_check(const penstock_header *h) {
    uint32_t crc = penstock_crc32c(0, h, offsetof(penstock_header, check));
    crc = penstock_crc32c(crc, h->lineage, sizeof h->lineage);
    return crc == 0 ? 1 : crc;
}

/* The state of a queue. `state_check`, if its halves agree, overrides `state`, which may have a flipped
 * bit or be stale: the process was killed between the two stores. */
static inline uint32_t penstock_state(const penstock_header *h) {
    uint64_t both = __atomic_load_n(&h->state_check, __ATOMIC_ACQUIRE);
    if (both != 0 && (uint32_t)both == ~(uint32_t)(both >> 32))
        return (uint32_t)both;
    return __atomic_load_n(&h->state, __ATOMIC_ACQUIRE);
}

/* Returns the name of the first invalid field of a header, or NULL. Checks all fields that
 * addresses are computed from. */
static inline const char *penstock_header_fault(const penstock_header *h, uint64_t file_size) {
    if (file_size < PENSTOCK_PAGE)
        return "file size";
    if (h->magic != PENSTOCK_MAGIC)
        return "magic";
    if (h->version != PENSTOCK_VERSION)
        return "version";
    if (h->slots < 2 || (h->slots & (h->slots - 1)) != 0 || h->slots > (1ull << 40))
        return "slots";
    if (h->buffer_size == 0 || h->buffer_size % PENSTOCK_PAGE != 0 || h->buffer_size > (1ull << 56))
        return "buffer_size";
    if (h->readers > (1u << 16))
        return "readers";
    if (h->slots_offset != penstock_slots_offset(h->readers))
        return "slots_offset";
    if (h->buffer_offset != penstock_buffer_offset(h->readers, h->slots))
        return "buffer_offset";
    if (h->file_size != h->buffer_offset + h->buffer_size)
        return "file_size";
    uint32_t check = __atomic_load_n(&h->check, __ATOMIC_ACQUIRE); /* 0 also during recovery */
    if (check != 0 && check != penstock_header_check(h) && check == __atomic_load_n(&h->check, __ATOMIC_ACQUIRE))
        return "check";
    uint64_t both = __atomic_load_n(&h->state_check, __ATOMIC_ACQUIRE);
    if ((both != 0 && (uint32_t)both != ~(uint32_t)(both >> 32)) || penstock_state(h) > PENSTOCK_REPLACED)
        return "state";
    return file_size < h->file_size ? "file size" : NULL;
}

/* Initialize a ring over mapped memory whose header has no fault. */
static inline penstock_ring penstock_over(void *base, bool writable) {
    uint8_t *bytes = (uint8_t *)base;
    penstock_header *h = (penstock_header *)base;
    penstock_ring ring;
    ring.header = h;
    ring.readers = (penstock_reader_entry *)(bytes + PENSTOCK_PAGE);
    ring.slots = (penstock_slot *)(bytes + h->slots_offset);
    ring.buffer = bytes + h->buffer_offset;
    ring.mask = h->slots - 1;
    ring.buffer_size = h->buffer_size;
    ring.crc = h->flags & PENSTOCK_WITH_CRC ? PENSTOCK_HAS_CRC : 0;
    ring.writable = writable;
    return ring;
}

/* Map a queue's file. Returns NULL, or the name of the fault: "open" and "map" set errno. */
static inline const char *penstock_map(const char *path, bool writable, penstock_ring *ring, int *fd) {
    *fd = open(path, (writable ? O_RDWR : O_RDONLY) | O_CLOEXEC);
    struct stat status;
    if (*fd < 0)
        return "open";
    if (fstat(*fd, &status) != 0)
        return close(*fd), "open";
    size_t size = (size_t)status.st_size;
    const char *fault = "file size";
    if (size >= PENSTOCK_PAGE) {
        void *base = mmap(NULL, size, PROT_READ | (writable ? PROT_WRITE : 0), MAP_SHARED, *fd, 0);
        fault = base == MAP_FAILED ? "map" : penstock_header_fault((penstock_header *)base, size);
        if (fault == NULL)
            *ring = penstock_over(base, writable);
        else if (base != MAP_FAILED)
            munmap(base, size);
    }
    if (fault != NULL)
        close(*fd);
    return fault;
}

static inline void penstock_unmap(penstock_ring *ring, int fd) {
    munmap(ring->header, ring->header->file_size);
    close(fd); /* drops the liveness locks */
}

/* Whether the file of a queue was removed, or another file took its name: what is written to it now is
 * for those only who have it open. A memfd never had a name. Call it about once a second. */
static inline bool penstock_is_removed(int fd) {
    struct stat status;
    if (fstat(fd, &status) != 0 || status.st_nlink != 0)
        return false;
    char link[32], name[8] = "";
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    return readlink(link, name, sizeof name - 1) < 0 || strcmp(name, "/memfd:") != 0;
}

/* Copy n bytes. When the target begins up to 256 bytes behind the source, counted within a page,
 * processors mistake what the C library's copy loads for what it has just stored: it gets two to
 * ten times slower. Steps of 64 bytes do not have that, and are quicker for small sizes anyway. */
static inline void penstock_copy(void *to, const void *from, size_t n) {
    uint8_t *t = (uint8_t *)to;
    const uint8_t *f = (const uint8_t *)from;
    if (n >= 256 && (n < 4096 || (((uintptr_t)to - (uintptr_t)from) & 4095) < 256))
        for (; n >= 64; n -= 64, t += 64, f += 64) {
            memcpy(t, f, 64);
            __asm__ volatile("" ::: "memory"); /* keep the steps apart */
        }
    memcpy(t, f, n);
}

static inline int64_t penstock_clock(clockid_t clock) {
    struct timespec now;
    clock_gettime(clock, &now);
    return (int64_t)now.tv_sec * PENSTOCK_SECOND + now.tv_nsec;
}

/* Yield to the sibling hyperthread while spinning. */
static inline void penstock_pause(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static inline uint32_t penstock_message_crc(const penstock_slot *slot, const uint8_t *bytes) {
    uint32_t crc = penstock_crc32c(0, slot, offsetof(penstock_slot, crc32c));
    return penstock_crc32c(crc, bytes, slot->block + slot->length);
}

/* --- rows of the reader table ----------------------------------------------------------------- */

/* The part of a row's checksum that is constant while the row has an owner. */
static inline uint32_t penstock_name_crc(const penstock_reader_entry *row) {
    return penstock_crc32c(0, row->name, sizeof row->name);
}

/* `check` of a position: the low half of the position in the high half, and a checksum of name, epoch
 * and position in the low half. So a stale or damaged position can be restored from it. Never 0. */
static inline uint64_t penstock_row_check(uint32_t name_crc, uint64_t epoch, uint64_t position) {
    uint64_t words[2] = {epoch, position};
    uint64_t word = position << 32 | penstock_crc32c(name_crc, words, sizeof words);
    return word == 0 ? 1 : word;
}

/* Store a position. The check first: it has the new position if a kill prevents the second store. */
static inline void penstock_move(penstock_reader_entry *row, uint32_t name_crc, uint64_t position) {
    if (row->name[sizeof row->name - 1] == 0) {
        uint64_t epoch = __atomic_load_n(&row->epoch, __ATOMIC_RELAXED);
        __atomic_store_n(&row->check, penstock_row_check(name_crc, epoch, position), __ATOMIC_RELAXED);
        PENSTOCK_FAULT_POINT();
    }
    __atomic_store_n(&row->position, position, __ATOMIC_RELEASE);
}

/* --- slots ----------------------------------------------------------------------------------- */

/* Slots are copied word by word, because another process may access the same words. */
static inline void penstock_load_slot(penstock_slot *to, const penstock_slot *from) {
    uint64_t words[8];
    for (int i = 0; i < 8; i++)
        words[i] = __atomic_load_n((const uint64_t *)from + i, __ATOMIC_RELAXED);
    memcpy(to, words, sizeof words);
}

static inline void penstock_store_slot(penstock_slot *to, const penstock_slot *from) {
    uint64_t words[8];
    memcpy(words, from, sizeof words);
    for (int i = 0; i < 8; i++) {
        __atomic_store_n((uint64_t *)to + i, words[i], __ATOMIC_RELAXED);
        PENSTOCK_FAULT_POINT();
    }
}

/* Whether the bytes of a slot lie within the buffer. */
static inline bool penstock_is_inside(const penstock_ring *ring, const penstock_slot *slot) {
    uint64_t size = ring->buffer_size;
    return slot->length <= size && slot->block <= size &&
           slot->position % size + slot->block + slot->length <= size;
}

/* Whether a slot is a valid slot of this message. */
static inline bool penstock_slot_is_sane(const penstock_ring *ring, const penstock_slot *slot,
                                         uint64_t seq) {
    uint64_t own = (slot->flags & PENSTOCK_HAS_STREAM ? 16 : 0) + (slot->flags & PENSTOCK_HAS_ORIGIN ? 8 : 0);
    return slot->seq == seq && (slot->flags & PENSTOCK_HAS_CRC) >= ring->crc &&
           own + slot->attributes <= slot->block && penstock_is_inside(ring, slot);
}

/* Whether slot, block and payload match the checksum, if there is one. */
static inline bool penstock_crc_holds(const penstock_ring *ring, const penstock_slot *slot) {
    return !(slot->flags & PENSTOCK_HAS_CRC) ||
           slot->crc32c == penstock_message_crc(slot, ring->buffer + slot->position % ring->buffer_size);
}

/* The same for a copied payload: the delivered bytes are the checked ones. The block is not copied. */
static inline bool penstock_copy_holds(const penstock_ring *ring, const penstock_slot *slot,
                                       const void *payload) {
    if (!(slot->flags & PENSTOCK_HAS_CRC))
        return true;
    uint32_t crc = penstock_crc32c(0, slot, offsetof(penstock_slot, crc32c));
    crc = penstock_crc32c(crc, ring->buffer + slot->position % ring->buffer_size, slot->block);
    return slot->crc32c == penstock_crc32c(crc, payload, slot->length);
}

/* --- writing --------------------------------------------------------------------------------- */

typedef struct {
    penstock_ring ring;
    int fd;              /* for the locks */
    uint32_t pid;        /* of this process */
    uint32_t number;     /* among many writers; 0: the only one */
    uint64_t head, tail; /* as in the header */
    uint64_t position;   /* behind the last message */
    int64_t created_ns;  /* of the last message */
    uint64_t planned;    /* messages placed and not published yet */
    uint64_t at;         /* position of the message under way */
    /* Readers to wait for. */
    uint32_t held[PENSTOCK_HELD_MAX], held_count;
    uint32_t holders; /* of the header, when `held` was set; see PENSTOCK_CHANGED */
    bool holding;
    uint64_t limit; /* held readers need messages from here on */
    uint64_t guard; /* as in the header; the largest number: none */
    /* A sparse queue has disk space for positions and slots below these. */
    uint64_t ready_position, ready_seq;
    int64_t looked; /* when penstock_write last checked that the file is not removed */
} penstock_writer;

static inline struct flock penstock_byte(uint64_t byte) {
    struct flock lock;
    memset(&lock, 0, sizeof lock);
    lock.l_type = F_WRLCK;
    lock.l_whence = SEEK_SET;
    lock.l_start = (off_t)byte;
    lock.l_len = 1;
    return lock;
}

/* Lock a liveness byte until the file is closed: 0, EBUSY if another has it, or an errno. */
static inline int penstock_live(int fd, uint64_t byte) {
    struct flock lock = penstock_byte(byte);
    if (fcntl(fd, F_OFD_SETLK, &lock) == 0)
        return 0;
    return errno == EAGAIN || errno == EACCES ? EBUSY : errno;
}

/* Whether another file description has locked a liveness byte. */
static inline bool penstock_is_alive(int fd, uint64_t byte) {
    struct flock lock = penstock_byte(byte);
    return fcntl(fd, F_OFD_GETLK, &lock) == 0 && lock.l_type != F_UNLCK;
}

/* Messages from here on may not be overwritten; the largest number: there is no such promise. */
static inline uint64_t penstock_guard(const penstock_ring *ring) {
    uint64_t guard = __atomic_load_n(&ring->header->guard, __ATOMIC_SEQ_CST);
    return guard == 0 ? UINT64_MAX : guard;
}

/* Resume after the last published message; unpublished ones of the last writer are discarded. A head
 * that damage has lowered is restored. The caller is the only writer, or has the lock. False: the queue
 * is damaged. */
static inline bool penstock_resume(penstock_writer *w) {
    const penstock_ring *ring = &w->ring;
    w->head = __atomic_load_n(&ring->header->head, __ATOMIC_ACQUIRE);
    uint64_t check = __atomic_load_n(&ring->header->head_check, __ATOMIC_ACQUIRE);
    if (check > w->head && ring->slots[(check - 1) & ring->mask].seq == check - 1)
        __atomic_store_n(&ring->header->head, w->head = check, __ATOMIC_RELEASE);
    w->tail = __atomic_load_n(&ring->header->tail, __ATOMIC_ACQUIRE);
    w->position = 0;
    w->created_ns = INT64_MIN;
    w->planned = 0;
    w->guard = penstock_guard(ring);
    uint64_t first = ring->header->first_seq;
    if (w->tail < first || w->head < w->tail || w->head - w->tail > ring->mask + 1)
        return false;
    if (w->head == first)
        return true;
    penstock_slot last;
    penstock_load_slot(&last, &ring->slots[(w->head - 1) & ring->mask]);
    w->position = penstock_align(last.position + last.block + last.length, PENSTOCK_ALIGN);
    w->created_ns = last.created_ns;
    return penstock_slot_is_sane(ring, &last, w->head - 1);
}

/* The kernel's id of this boot; zeros if unknown. */
static inline void penstock_boot_id(uint8_t id[16]) {
    char text[40] = "";
    int fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC), digits = 0;
    ssize_t n = fd < 0 ? 0 : read(fd, text, sizeof text - 1);
    if (fd >= 0)
        close(fd);
    memset(id, 0, 16);
    for (ssize_t i = 0; i < n && digits < 32; i++) {
        const char *hex = "0123456789abcdef", *digit = text[i] ? strchr(hex, text[i]) : NULL;
        if (digit != NULL)
            id[digits / 2] = (uint8_t)(id[digits / 2] << 4 | (digit - hex)), digits++;
    }
}

/* Become a writer of a mapped queue: 0, EBUSY if there is another one or none is let in, EPIPE if
 * the queue was sealed or replaced, or an errno of the lock. */
static inline int penstock_writer_claim(penstock_writer *w, penstock_ring ring, int fd) {
    memset(w, 0, sizeof *w);
    w->ring = ring;
    w->fd = fd;
    w->pid = (uint32_t)getpid();
    int error;
    w->limit = w->guard = w->ready_position = w->ready_seq = UINT64_MAX;
    if (penstock_state(ring.header) != PENSTOCK_LIVE)
        return EPIPE;
    if (ring.header->flags & PENSTOCK_MANY_WRITERS) {
        do { /* 31 bits: the top bit is a flag, and 0 means no writer */
            uint32_t n = __atomic_add_fetch(&ring.header->next_writer, 1, __ATOMIC_RELAXED);
            PENSTOCK_FAULT_POINT();
            w->number = n & INT32_MAX;
            error = w->number == 0 ? EBUSY : penstock_live(fd, PENSTOCK_LIVE_WRITER + w->number);
            if (error == EBUSY && penstock_is_alive(fd, PENSTOCK_LIVE_WRITER))
                return EBUSY; /* all bytes may be locked, to keep writers out */
        } while (error == EBUSY);
        return error;
    }
    if ((error = penstock_live(fd, PENSTOCK_LIVE_WRITER)) == 0)
        __atomic_store_n(&ring.header->writer_pid, w->pid, __ATOMIC_RELAXED);
    PENSTOCK_FAULT_POINT();
    return error;
}

/* The same, ready to write: also EBADMSG when the queue is damaged, EOPNOTSUPP when it is compressed or
 * sparse, and ENOTRECOVERABLE when the machine crashed since the last writer: let penstock open it for
 * writing first. Many writers resume each time they take the lock. */
static inline int penstock_writer_open(penstock_writer *w, penstock_ring ring, int fd) {
    uint64_t boot[2], *known = (uint64_t *)(void *)ring.header->boot_id;
    if (ring.header->compression != 0 || (ring.header->flags & PENSTOCK_SPARSE))
        return EOPNOTSUPP;
    penstock_boot_id((uint8_t *)boot);
    for (int i = 0; i < 2; i++) { /* word by word: other writers may store it */
        uint64_t word = __atomic_load_n(&known[i], __ATOMIC_RELAXED);
        if (word != 0 && word != boot[i])
            return ENOTRECOVERABLE;
    }
    int error = penstock_writer_claim(w, ring, fd);
    if (error != 0)
        return error;
    bool is_new = false;
    for (int i = 0; i < 2; i++)
        is_new = __atomic_exchange_n(&known[i], boot[i], __ATOMIC_RELAXED) != boot[i] || is_new;
    /* On the disk before the first message: otherwise the queue could look clean after a power failure. */
    if (is_new && fdatasync(fd) != 0)
        return errno;
    return w->number != 0 || penstock_resume(w) ? 0 : EBADMSG;
}

/* Sleep while *word is `seen`; 0 or an errno (ETIMEDOUT, EINTR, EAGAIN: it was not). */
static inline int penstock_futex_wait(uint32_t *word, uint32_t seen, int64_t nanoseconds) {
    struct timespec limit;
    limit.tv_sec = nanoseconds / 1000000000;
    limit.tv_nsec = nanoseconds % 1000000000;
    return syscall(SYS_futex, word, FUTEX_WAIT, seen, &limit, NULL, 0) == 0 ? 0 : errno;
}

#define PENSTOCK_LOCK_WAITERS 0x80000000u

/* Store this writer's number in the lock, if it still is `seen`. */
static inline bool penstock_take(penstock_writer *w, uint32_t *seen, uint32_t mine) {
    penstock_header *h = w->ring.header;
    PENSTOCK_FAULT_POINT();
    if (!__atomic_compare_exchange_n(&h->lock, seen, mine, false, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED))
        return false;
    PENSTOCK_FAULT_POINT();
    __atomic_store_n(&h->writer_pid, w->pid, __ATOMIC_RELAXED);
    PENSTOCK_FAULT_POINT();
    return true;
}

/* Take the lock of many writers within a time: 0, ETIMEDOUT or EINTR. A dead holder loses it, and its
 * unpublished messages are discarded. */
static inline int penstock_lock(penstock_writer *w, int64_t nanoseconds) {
    uint32_t *lock = &w->ring.header->lock, seen = 0, mine = w->number;
    if (penstock_take(w, &seen, mine))
        return 0;
    const int64_t slice = 20000000; /* how soon a death is noticed */
    mine |= PENSTOCK_LOCK_WAITERS;  /* other writers may sleep, too */
    int64_t deadline = penstock_clock(CLOCK_MONOTONIC) + nanoseconds;
    for (bool again = nanoseconds > 0;; again = (nanoseconds = deadline - penstock_clock(CLOCK_MONOTONIC)) > 0) {
        seen = __atomic_load_n(lock, __ATOMIC_RELAXED);
        uint32_t holder = seen & ~PENSTOCK_LOCK_WAITERS;
        if (holder == 0 || !penstock_is_alive(w->fd, PENSTOCK_LIVE_WRITER + holder)) {
            if (penstock_take(w, &seen, mine))
                return 0;
            continue;
        }
        if (!again)
            return ETIMEDOUT;
        if (!(seen & PENSTOCK_LOCK_WAITERS)) {
            PENSTOCK_FAULT_POINT();
            if (!__atomic_compare_exchange_n(lock, &seen, seen | PENSTOCK_LOCK_WAITERS, false,
                                             __ATOMIC_RELAXED, __ATOMIC_RELAXED))
                continue;
            PENSTOCK_FAULT_POINT();
            seen |= PENSTOCK_LOCK_WAITERS;
        }
        int64_t turn = nanoseconds < slice ? nanoseconds : slice;
        int error = penstock_futex_wait(lock, seen, turn);
        if (error == EINTR)
            return EINTR;
    }
}

/* Resume writing after taking the lock: OK, CLOSED or DAMAGED. */
static inline penstock_code penstock_take_over(penstock_writer *w) {
    if (penstock_state(w->ring.header) != PENSTOCK_LIVE)
        return PENSTOCK_CLOSED;
    return penstock_resume(w) ? PENSTOCK_OK : PENSTOCK_DAMAGED;
}

static inline void penstock_unlock(penstock_writer *w) {
    PENSTOCK_FAULT_POINT();
    uint32_t seen = __atomic_exchange_n(&w->ring.header->lock, 0, __ATOMIC_RELEASE);
    PENSTOCK_FAULT_POINT();
    if (seen & PENSTOCK_LOCK_WAITERS)
        syscall(SYS_futex, &w->ring.header->lock, FUTEX_WAKE, 1, NULL, NULL, 0);
}

/* The lowest position of the held readers. */
static inline uint64_t penstock_held(const penstock_writer *w) {
    uint64_t lowest = UINT64_MAX;
    for (uint32_t i = 0; i < w->held_count; i++) {
        uint64_t p = __atomic_load_n(&w->ring.readers[w->held[i]].position, __ATOMIC_ACQUIRE);
        lowest = p < lowest ? p : lowest;
    }
    return lowest;
}

/* Wake the sleepers on `wakes`, if `flag` is set. Call it after the store that sleepers check once
 * they have set the flag. */
static inline void penstock_wake(uint32_t *flag, uint32_t *wakes) {
    __atomic_thread_fence(__ATOMIC_SEQ_CST); /* the store comes before the load of the flag */
    if (__atomic_load_n(flag, __ATOMIC_RELAXED) == 0)
        return;
    __atomic_store_n(flag, 0, __ATOMIC_RELAXED);
    PENSTOCK_FAULT_POINT();
    __atomic_add_fetch(wakes, 1, __ATOMIC_SEQ_CST);
    PENSTOCK_FAULT_POINT();
    syscall(SYS_futex, wakes, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

/* Publish every message that was placed. */
static inline void penstock_publish(penstock_writer *w) {
    if (w->planned == 0)
        return;
    penstock_header *h = w->ring.header;
    w->head += w->planned;
    w->planned = 0;
    PENSTOCK_FAULT_POINT();
    __atomic_store_n(&h->head, w->head, __ATOMIC_RELEASE);
    PENSTOCK_FAULT_POINT();
    __atomic_store_n(&h->head_check, w->head, __ATOMIC_RELEASE);
    PENSTOCK_FAULT_POINT();
    penstock_wake(&h->sleeping, &h->wakes);
}

/* Make room for a message of `bytes` bytes (block and payload), and return its address in `to`.
 * On any other code than OK nothing was changed. */
static inline penstock_code penstock_begin(penstock_writer *w, uint64_t bytes, uint8_t **to) {
    uint64_t size = w->ring.buffer_size, room = penstock_align(bytes, PENSTOCK_ALIGN);
    if (bytes > size)
        return PENSTOCK_TOO_LARGE;
    uint64_t at = w->position, next = w->head + w->planned, tail = w->tail;
    if (at % size + room > size) /* a message is contiguous */
        at += size - at % size;
    /* A damaged position above `at` makes the difference wrap around, so that message is freed. */
    while (tail < next && (next - tail > w->ring.mask ||
                           at - w->ring.slots[tail & w->ring.mask].position > size - room))
        tail++;
    if (tail != w->tail && (w->ring.header->flags & PENSTOCK_KEEPS))
        return PENSTOCK_FULL;
    if (tail != w->tail && w->holding) {
        if (__atomic_load_n(&w->ring.header->holders, __ATOMIC_RELAXED) != w->holders)
            return PENSTOCK_CHANGED;
        if (tail > w->limit && tail > (w->limit = penstock_held(w)))
            return PENSTOCK_FULL;
    }
    if (tail != w->tail && w->number != 0)
        w->guard = penstock_guard(&w->ring); /* another writer may have synced since the lock was taken */
    if (tail != w->tail && tail > w->guard)
        return PENSTOCK_GUARDED;
    if (at + room > w->ready_position || next >= w->ready_seq)
        return PENSTOCK_NO_SPACE;
    /* Unpublished messages cannot be freed. And the slot of the last published message must stay
     * unchanged: the next writer resumes after it. */
    if (tail > w->head || w->planned == w->ring.mask)
        penstock_publish(w);
    if (tail != w->tail) {
        w->tail = tail;
        PENSTOCK_FAULT_POINT();
        __atomic_store_n(&w->ring.header->tail, tail, __ATOMIC_RELAXED);
        __atomic_thread_fence(__ATOMIC_RELEASE); /* before any byte of the new message */
        PENSTOCK_FAULT_POINT();
    }
    w->at = at;
    *to = w->ring.buffer + at % size;
    return PENSTOCK_OK;
}

/* Fill in the slot of the message whose bytes are at `bytes`, and store it at `place`. The caller sets
 * length, block, attributes, type, subtype, flags, time_ns and created_ns; it brings both to their places
 * in the queue, and publishes the message afterwards. */
static inline uint64_t penstock_finish_at(penstock_writer *w, penstock_slot *slot, const uint8_t *bytes,
                                          penstock_slot *place) {
    slot->seq = w->head + w->planned;
    slot->position = w->at;
    slot->created_ns = slot->created_ns < w->created_ns ? w->created_ns : slot->created_ns;
    slot->crc32c = 0;
    if (w->ring.crc) {
        slot->flags |= PENSTOCK_HAS_CRC;
        slot->crc32c = penstock_message_crc(slot, bytes);
    }
    PENSTOCK_FAULT_POINT();
    penstock_store_slot(place, slot);
    w->position = penstock_align(w->at + slot->block + slot->length, PENSTOCK_ALIGN);
    w->created_ns = slot->created_ns;
    w->planned++;
    return slot->seq;
}

/* The same for a message whose bytes are in place now. */
static inline uint64_t penstock_finish(penstock_writer *w, penstock_slot *slot) {
    const uint8_t *bytes = w->ring.buffer + w->at % w->ring.buffer_size;
    return penstock_finish_at(w, slot, bytes, &w->ring.slots[(w->head + w->planned) & w->ring.mask]);
}

/* Sync, record the end of the synced messages on disk, and remove the guard: 0 or an errno. */
static inline int penstock_drop_guard(penstock_writer *w) {
    penstock_header *h = w->ring.header;
    if (fdatasync(w->fd) != 0)
        return errno;
    __atomic_store_n(&h->guard_next, w->head, __ATOMIC_RELAXED);
    if (fdatasync(w->fd) != 0)
        return errno;
    __atomic_store_n(&h->guard, UINT64_MAX, __ATOMIC_RELAXED);
    w->guard = UINT64_MAX;
    return 0;
}

/* Append one message of plain bytes: OK, TOO_LARGE, FULL, DAMAGED, CLOSED, GUARDED when a sync
 * fails (see errno), EMPTY when another writer kept the lock for 10 s, or REMOVED. That is checked once a
 * second, before the message is placed; those of the last second may be in the removed file. */
static inline penstock_code penstock_write(penstock_writer *w, const void *payload, uint64_t length,
                                           int32_t type, int32_t subtype) {
    int64_t now = penstock_clock(CLOCK_MONOTONIC_COARSE);
    if (w->looked == 0 || now - w->looked > PENSTOCK_SECOND) {
        if (penstock_is_removed(w->fd))
            return PENSTOCK_REMOVED;
        w->looked = now;
    }
    if (w->number != 0) {
        int error;
        while ((error = penstock_lock(w, 10000000000)) == EINTR)
            ;
        if (error != 0)
            return PENSTOCK_EMPTY;
    }
    uint8_t *to;
    penstock_code code = w->number != 0 ? penstock_take_over(w) : PENSTOCK_OK;
    if (code == PENSTOCK_OK)
        code = penstock_begin(w, length, &to);
    if (code == PENSTOCK_GUARDED && penstock_drop_guard(w) == 0)
        code = penstock_begin(w, length, &to);
    if (code == PENSTOCK_OK) {
        penstock_slot slot;
        memset(&slot, 0, sizeof slot);
        slot.time_ns = slot.created_ns = penstock_clock(CLOCK_REALTIME);
        slot.length = length;
        slot.type = type;
        slot.subtype = subtype;
        penstock_copy(to, payload, length);
        penstock_finish(w, &slot);
        penstock_publish(w);
    }
    if (w->number != 0)
        penstock_unlock(w);
    return code;
}

/* --- reading --------------------------------------------------------------------------------- */

/* The number of the next message. */
static inline uint64_t penstock_head(const penstock_ring *ring) {
    return __atomic_load_n(&ring->header->head, __ATOMIC_ACQUIRE);
}

/* The number of the oldest message. */
static inline uint64_t penstock_tail(const penstock_ring *ring) {
    return __atomic_load_n(&ring->header->tail, __ATOMIC_ACQUIRE);
}

/* Whether all bytes copied so far of this message, and of later ones, were intact. */
static inline bool penstock_still_there(const penstock_ring *ring, uint64_t seq) {
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    return seq >= __atomic_load_n(&ring->header->tail, __ATOMIC_RELAXED);
}

/* Copy the slot of a published message. OK means that its bytes are within the buffer; copy them,
 * then check penstock_still_there. */
static inline penstock_code penstock_slot_of(const penstock_ring *ring, uint64_t seq,
                                             penstock_slot *slot) {
    penstock_load_slot(slot, &ring->slots[seq & ring->mask]);
    if (!penstock_still_there(ring, seq))
        return PENSTOCK_LAPPED;
    return penstock_slot_is_sane(ring, slot, seq) ? PENSTOCK_OK : PENSTOCK_DAMAGED;
}

/* The time of a message's first append, in its first queue. `bytes` are those of its slot, from the
 * block on, or a copy of them. */
static inline int64_t penstock_origin(const penstock_slot *slot, const uint8_t *bytes) {
    int64_t origin = slot->created_ns;
    if (slot->flags & PENSTOCK_HAS_ORIGIN)
        memcpy(&origin, bytes + slot->block - 8, 8);
    return origin;
}

/* Where the bytes of a slot (block, then payload) are. */
static inline const uint8_t *penstock_bytes(const penstock_ring *ring, const penstock_slot *slot) {
    return ring->buffer + slot->position % ring->buffer_size;
}

/* Copy the payload of message `seq` to memory of `room` bytes. OK, EMPTY, LAPPED (resume at
 * penstock_tail), TOO_LARGE (slot->length is the size needed) or DAMAGED. */
static inline penstock_code penstock_read(const penstock_ring *ring, uint64_t seq, penstock_slot *slot,
                                          void *payload, uint64_t room) {
    if (seq >= penstock_head(ring))
        return PENSTOCK_EMPTY;
    penstock_code code = penstock_slot_of(ring, seq, slot);
    if (code != PENSTOCK_OK)
        return code;
    if (slot->length > room) {
        bool is_so = penstock_crc_holds(ring, slot);
        return !penstock_still_there(ring, seq) ? PENSTOCK_LAPPED : is_so ? PENSTOCK_TOO_LARGE : PENSTOCK_DAMAGED;
    }
    penstock_copy(payload, penstock_bytes(ring, slot) + slot->block, slot->length);
    bool whole = penstock_copy_holds(ring, slot, payload);
    if (!penstock_still_there(ring, seq))
        return PENSTOCK_LAPPED;
    return whole ? PENSTOCK_OK : PENSTOCK_DAMAGED;
}

/* Copy the payloads of messages first .. end-1 back to back, or only check them (to is NULL).
 * Returns the number of the first that is bad or does not fit, or `end`. Then check
 * penstock_still_there(ring, first). */
static inline uint64_t penstock_copy_run(const penstock_ring *ring, uint64_t first, uint64_t end,
                                         uint8_t *to, uint64_t room) {
    for (; first < end; first++) {
        penstock_slot slot;
        penstock_load_slot(&slot, &ring->slots[first & ring->mask]);
        if (!penstock_slot_is_sane(ring, &slot, first) || (to != NULL && slot.length > room))
            break;
        if (to != NULL) {
            penstock_copy(to, penstock_bytes(ring, &slot) + slot.block, slot.length);
            to += slot.length;
            room -= slot.length;
        }
        if (!penstock_crc_holds(ring, &slot))
            break;
    }
    return first;
}

/* A held reader is done with everything before `seq`. */
static inline void penstock_acknowledge(const penstock_ring *ring, uint32_t reader, uint64_t seq) {
    penstock_reader_entry *row = &ring->readers[reader];
    PENSTOCK_FAULT_POINT();
    penstock_move(row, penstock_name_crc(row), seq);
    PENSTOCK_FAULT_POINT();
    penstock_wake(&ring->header->room_wanted, &ring->header->room_wakes);
}

/* Sleep until message `seq` is published, or a time has passed: 0 (check again), ETIMEDOUT or EINTR.
 * Sleep a second at most at a time: a killed writer may not have woken its readers. */
static inline int penstock_sleep(const penstock_ring *ring, uint64_t seq, int64_t nanoseconds) {
    penstock_header *h = ring->header;
    if (!ring->writable) { /* it cannot set the flag for the writer */
        struct timespec pause = {0, nanoseconds < 2000000 ? nanoseconds : 2000000};
        return nanosleep(&pause, NULL) == 0 ? 0 : errno;
    }
    int64_t start = penstock_clock(CLOCK_MONOTONIC), spin = nanoseconds < PENSTOCK_SPIN ? nanoseconds : PENSTOCK_SPIN;
    while (penstock_clock(CLOCK_MONOTONIC) - start < spin) {
        if (penstock_head(ring) > seq)
            return 0;
        for (int i = 0; i < 20; i++)
            penstock_pause();
    }
    uint32_t wakes = __atomic_load_n(&h->wakes, __ATOMIC_SEQ_CST);
    __atomic_store_n(&h->sleeping, 1, __ATOMIC_SEQ_CST);
    __atomic_thread_fence(__ATOMIC_SEQ_CST); /* the flag is set before the load of head */
    PENSTOCK_FAULT_POINT();
    if (penstock_head(ring) > seq)
        return 0;
    int error = penstock_futex_wait(&h->wakes, wakes, nanoseconds);
    return error == EAGAIN ? 0 : error;
}

/* Sleep in the same way until the held readers have moved past `limit`. */
static inline int penstock_sleep_for_room(const penstock_writer *w, int64_t nanoseconds) {
    penstock_header *h = w->ring.header;
    int64_t start = penstock_clock(CLOCK_MONOTONIC), spin = nanoseconds < PENSTOCK_SPIN ? nanoseconds : PENSTOCK_SPIN;
    while (penstock_clock(CLOCK_MONOTONIC) - start < spin) {
        if (penstock_held(w) > w->limit)
            return 0;
        for (int i = 0; i < 20; i++)
            penstock_pause();
    }
    uint32_t wakes = __atomic_load_n(&h->room_wakes, __ATOMIC_SEQ_CST);
    __atomic_store_n(&h->room_wanted, 1, __ATOMIC_SEQ_CST);
    __atomic_thread_fence(__ATOMIC_SEQ_CST); /* as above */
    PENSTOCK_FAULT_POINT();
    if (penstock_held(w) > w->limit || nanoseconds <= 0)
        return 0;
    int error = penstock_futex_wait(&h->room_wakes, wakes, nanoseconds);
    return error == EAGAIN ? 0 : error;
}

/* A sleeper for many queues. Initialize it with penstock_sleeper_init, add up to 127 queues, then sleep. */
typedef struct {
    struct {
        uint64_t value, address;
        uint32_t flags, unused;
    } words[PENSTOCK_SLEEP_MAX]; /* as the kernel's futex_waitv takes them */
    int count;
    bool ready; /* one of the queues has its message already */
} penstock_sleeper;

/* Another thread wakes it by setting `bell` to nonzero, and a futex wake. */
static inline void penstock_sleeper_init(penstock_sleeper *s, uint32_t *bell) {
    memset(s, 0, sizeof *s);
    s->words[0].address = (uintptr_t)bell;
    s->words[0].flags = 2; /* 32 bits */
    s->count = 1;
}

/* Add a queue, and the number of the message to wait for. A queue that is mapped read-only is ignored:
 * poll it. */
static inline void penstock_sleeper_add(penstock_sleeper *s, const penstock_ring *ring, uint64_t seq) {
    penstock_header *h = ring->header;
    if (!ring->writable || s->count == PENSTOCK_SLEEP_MAX)
        return;
    s->words[s->count].value = __atomic_load_n(&h->wakes, __ATOMIC_SEQ_CST);
    s->words[s->count].address = (uintptr_t)&h->wakes;
    s->words[s->count++].flags = 2;
    __atomic_store_n(&h->sleeping, 1, __ATOMIC_SEQ_CST);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    PENSTOCK_FAULT_POINT();
    s->ready = s->ready || penstock_head(ring) > seq;
}

/* Sleep until `deadline` (CLOCK_MONOTONIC): 0 (check again), ETIMEDOUT, EINTR, or ENOSYS before Linux 5.16. */
static inline int penstock_sleeper_sleep(const penstock_sleeper *s, int64_t deadline) {
    struct timespec until = {deadline / PENSTOCK_SECOND, deadline % PENSTOCK_SECOND};
    if (s->ready || syscall(449, s->words, s->count, 0, &until, CLOCK_MONOTONIC) >= 0 || errno == EAGAIN)
        return 0;
    return errno;
}

#ifdef __cplusplus
}
#endif

#endif
