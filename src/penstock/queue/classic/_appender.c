/* How does a message get into a classic queue?
 *
 * This is LROSE's write algorithm (lock, place, write, unlock) for one chunk of messages at a
 * time, in C because one message costs less than a microsecond of computation and eight system
 * calls. It does the regular case only. An irregular case - a held lock, an inconsistent status,
 * a reader to wait for - is reported by a code before anything is changed, and Python
 * decides.
 *
 * Order of the stores, which readers in other processes rely on:
 *     freed slots and a status without them, if their bytes are reused;
 *     message bytes; new slots; status.
 * A reader reads the status first, so a chunk is invisible until its status is written; a slot
 * is freed before its bytes are reused, so a reader that reads its slots again after copying
 * knows whether the copy is complete.
 *
 * Slots and status belong together: an LROSE writer that finds one without the other, because we
 * were killed in between, empties the queue. So nothing else is done between their stores, and
 * where all of them are in one page of the file they are one write, which a kill cannot split.
 *
 * The files are not mapped: LROSE re-creates a queue by truncating it, and access to a mapped
 * page past the new end raises SIGBUS.
 */
#define PY_SSIZE_T_CLEAN
#define _GNU_SOURCE
#include <Python.h>
#include <structmember.h>

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/shm.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum { STATUS_MAGIC = 88008801, MESSAGE_MAGIC = 88008802 };
enum { STATUS_SIZE = 56, SLOT_SIZE = 40, FRAME_HEAD = 8, FRAME_EXTRA = 12 };
enum { ID_COUNT = 1000000000 };

/* One chunk: what is written under one lock. Bounded, so that other writers get their turn. */
enum { PAGE = 4096, SLOTS_IN_PAGE = (PAGE - STATUS_SIZE) / SLOT_SIZE, MOST_RUNS = 4 };
enum { CHUNK_MESSAGES = 256, CHUNK_BYTES = 4 << 20, WINDOW_SLOTS = 128, SMALL_FRAME = 4096 };

/* What append() reports (mirrored in _appender.pyi); the last two stay in this file. */
enum Outcome { WRITTEN, BUSY, GONE, IRREGULAR, TOO_LARGE, WAIT, FORKED, CHUNK_FULL, OS_ERROR };

typedef struct {
    int32_t magic, youngest_id, youngest_slot, oldest_slot, nslots, buf_size;
    int32_t begin_insert, end_insert, begin_append, append_mode;
    int32_t time_written, blocking_write, last_id_read, checksum;
} Status;

typedef struct {
    int32_t active, id, time, msg_len, stored_len, offset, type, subtype, compress, checksum;
} Slot;

_Static_assert(sizeof(Status) == STATUS_SIZE && sizeof(Slot) == SLOT_SIZE, "layout");

/* A message to be appended. */
typedef struct {
    Py_buffer payload;
    int32_t msg_len, type, subtype, time, compress;
    Slot slot;    /* where it was placed */
    int32_t index; /* the slot's number */
    unsigned char head[FRAME_HEAD];
    unsigned char tail[8]; /* padding, then the id */
    int tail_len;
} Entry;

typedef struct {
    PyObject_HEAD
    int lock_fd, stat_fd, buf_fd;       /* file queue */
    Py_buffer stat_mem, buf_mem;        /* shared-memory queue: .buf is NULL for a file queue */
    int shm_key, stat_shm_id, buf_shm_id;
    Entry *entries; /* scratch for one chunk */
    int count, last_id; /* messages written by the last call, and the last id */
    bool busy;      /* a thread is in a call, without the interpreter's lock */
    unsigned forks; /* of this process, when the files were opened */
    /* Slots read ahead, because messages free a run of them. Valid while the status is the one
     * that was written here last: then no other writer wrote meanwhile. */
    Status written;
    int32_t window_base, window_start, window_end;
    Slot window[WINDOW_SLOTS];
} Appender;

/* Forks between the process that loaded this module and this one. The lock belongs to the open
 * file, which a child shares with its parent: it has to open its own. */
static unsigned forks;
static void count_fork(void) { forks++; }

/* Raised in a second thread. Of its own type: a signal handler may raise a RuntimeError. */
static PyObject *second_thread;

/* Bytes of the buffer, from the first to before the last. */
typedef struct {
    int32_t begin, end;
} Run;

/* The plan for one chunk: what the status will be, and which slots are freed for it. */
typedef struct {
    Status found, status;
    int32_t published, published_slot; /* the youngest published message */
    int32_t first_placed, placed;     /* the chunk's own slots, a run around the ring */
    int32_t first_freed, freed;       /* the slots freed for it, another run */
    int32_t live; /* messages that were there */
    Run reused[MOST_RUNS]; /* their bytes; more runs than these are counted only */
    int runs;
} Plan;

/* --- big-endian words and checksums (docs/specs/lrose.md 1.5) ------------------------------ */

static void swap_words(void *words, size_t n)
{
    uint32_t *w = words;
    for (size_t i = 0; i < n; i++)
        w[i] = __builtin_bswap32(w[i]);
}

static void put_word(unsigned char *at, int32_t value)
{
    uint32_t w = __builtin_bswap32((uint32_t)value);
    memcpy(at, &w, sizeof w);
}

static int32_t status_checksum(const Status *s)
{
    uint32_t sum = (uint32_t)s->magic + ~(uint32_t)s->youngest_id + (uint32_t)s->youngest_slot +
                   ~(uint32_t)s->oldest_slot + (uint32_t)s->nslots + (uint32_t)s->buf_size +
                   ~(uint32_t)s->begin_insert + (uint32_t)s->end_insert +
                   ~(uint32_t)s->begin_append + (uint32_t)s->append_mode +
                   (uint32_t)s->time_written + ~(uint32_t)s->blocking_write;
    return (int32_t)sum;
}

static int32_t slot_checksum(const Slot *s)
{
    uint32_t sum = (uint32_t)s->active + ~(uint32_t)s->id + (uint32_t)s->time +
                   ~(uint32_t)s->msg_len + (uint32_t)s->stored_len + (uint32_t)s->offset +
                   ~(uint32_t)s->type + (uint32_t)s->subtype + ~(uint32_t)s->compress;
    return (int32_t)sum;
}

/* --- the medium: a pair of files, or two shared-memory segments ----------------------------- */

static bool in_memory(const Appender *a) { return a->stat_mem.buf != NULL; }

static int read_stat(Appender *a, void *to, size_t n, off_t at)
{
    if (in_memory(a)) {
        if (at + (off_t)n > a->stat_mem.len)
            return 0;
        memcpy(to, (char *)a->stat_mem.buf + at, n);
        atomic_thread_fence(memory_order_acquire);
        return 1;
    }
    ssize_t got = pread(a->stat_fd, to, n, at);
    return got < 0 ? -1 : (size_t)got == n;
}

/* A writer can be killed during a copy, and a reader can read during one. So that an incomplete
 * slot appears free to both, its first word, `active`, is the last to be set and the first to be
 * cleared. */
static void store_slots(unsigned char *to, const Slot *slots, int32_t n)
{
    for (int32_t i = 0; i < n; i++, to += SLOT_SIZE) {
        _Atomic int32_t *active = (_Atomic int32_t *)(void *)to;
        if (slots[i].active == 0)
            atomic_store_explicit(active, 0, memory_order_relaxed);
        atomic_thread_fence(memory_order_release);
        memcpy(to + sizeof *active, &slots[i].id, SLOT_SIZE - sizeof *active);
        atomic_store_explicit(active, slots[i].active, memory_order_release);
    }
}

static int write_part(const Py_buffer *memory, int fd, const void *from, size_t n, off_t at)
{
    if (memory->buf != NULL) {
        atomic_thread_fence(memory_order_release);
        memcpy((char *)memory->buf + at, from, n);
        return 0;
    }
    while (n > 0) {
        ssize_t put = pwrite(fd, from, n, at);
        if (put < 0 && errno == EINTR)
            continue;
        if (put < 0)
            return -1;
        from = (const char *)from + put;
        n -= (size_t)put;
        at += put;
    }
    return 0;
}

static int write_stat(Appender *a, const void *from, size_t n, off_t at)
{
    return write_part(&a->stat_mem, a->stat_fd, from, n, at);
}

/* Write a run of adjacent framed messages. */
static int write_frames(Appender *a, struct iovec *iov, int n, off_t at)
{
    if (in_memory(a)) {
        atomic_thread_fence(memory_order_release);
        for (int i = 0; i < n; i++) {
            memcpy((char *)a->buf_mem.buf + at, iov[i].iov_base, iov[i].iov_len);
            at += (off_t)iov[i].iov_len;
        }
        return 0;
    }
    while (n > 0) {
        ssize_t put = pwritev(a->buf_fd, iov, n, at);
        if (put < 0 && errno == EINTR)
            continue;
        if (put < 0)
            return -1;
        at += put;
        while (n > 0 && (size_t)put >= iov->iov_len) {
            put -= (ssize_t)iov->iov_len;
            iov++, n--;
        }
        if (n > 0) {
            iov->iov_base = (char *)iov->iov_base + put;
            iov->iov_len -= (size_t)put;
        }
    }
    return 0;
}

/* An open-file-description lock conflicts with LROSE's fcntl lock, and unlike that one it is
 * not released when this process closes the file elsewhere (docs/specs/lrose.md 1.11, 6.2). */
static int set_lock(Appender *a, short kind)
{
    struct flock whole = {.l_type = kind, .l_whence = SEEK_SET};
    return fcntl(a->lock_fd, F_OFD_SETLK, &whole);
}

/* Whether the open queue was removed, or its segments were replaced. */
static bool is_gone(Appender *a)
{
    if (in_memory(a))
        return shmget(a->shm_key, 0, 0) != a->stat_shm_id ||
               shmget(a->shm_key + 1, 0, 0) != a->buf_shm_id;
    /* Not fstat: a query of a file's times makes the next write to it twice as slow. */
    struct statx stat, buf;
    return statx(a->stat_fd, "", AT_EMPTY_PATH, STATX_NLINK, &stat) != 0 || stat.stx_nlink == 0 ||
           statx(a->buf_fd, "", AT_EMPTY_PATH, STATX_NLINK, &buf) != 0 || buf.stx_nlink == 0;
}

/* --- placing messages (docs/specs/lrose.md 1.8) -------------------------------------------- */

static int32_t next_slot(const Status *s, int32_t slot) { return slot >= s->nslots - 1 ? 0 : slot + 1; }
static int32_t next_id(int32_t id) { return id >= ID_COUNT - 1 ? 0 : id + 1; }

/* There were messages, and a writer that died had freed them all (see slots.py). */
static bool is_all_freed(const Status *s)
{
    return s->youngest_id >= 0 && s->begin_append == 0 &&
           s->oldest_slot == next_slot(s, s->youngest_slot);
}

static bool is_sane(const Status *s)
{
    return s->magic == STATUS_MAGIC && (s->checksum == 0 || s->checksum == status_checksum(s)) &&
           s->nslots > 0 && s->buf_size > 0 && s->youngest_id >= -1 && s->youngest_id < ID_COUNT &&
           s->youngest_slot >= -1 && s->youngest_slot < s->nslots && s->oldest_slot >= -1 &&
           s->oldest_slot < s->nslots && (s->youngest_slot < 0) == (s->youngest_id < 0) &&
           (s->oldest_slot < 0 || s->youngest_slot >= 0) &&
           (s->oldest_slot < 0 || s->begin_append >= FRAME_EXTRA || is_all_freed(s)) &&
           0 <= s->begin_insert && s->begin_insert <= s->end_insert &&
           s->end_insert <= s->begin_append && s->begin_append <= s->buf_size;
}

/* The slot of the oldest message, read ahead with the following published ones. */
static const Slot *oldest_slot(Appender *a, const Plan *p)
{
    int32_t slot = p->status.oldest_slot;
    if (slot < a->window_start || slot >= a->window_end) {
        int32_t end = slot <= p->published_slot ? p->published_slot + 1 : p->status.nslots;
        int32_t n = end - slot < WINDOW_SLOTS ? end - slot : WINDOW_SLOTS;
        off_t at = STATUS_SIZE + (off_t)SLOT_SIZE * slot;
        a->window_start = a->window_end = 0;
        if (read_stat(a, a->window, (size_t)n * SLOT_SIZE, at) != 1)
            return NULL;
        swap_words(a->window, (size_t)n * SLOT_SIZE / 4);
        a->window_base = a->window_start = slot;
        a->window_end = slot + n;
    }
    return &a->window[slot - a->window_base];
}

/* Step F: free the oldest slot, in the plan. `guarded`: not from under a blocking reader. */
static enum Outcome evict(Appender *a, Plan *p, bool guarded)
{
    Status *s = &p->status;
    int32_t oldest = s->oldest_slot;
    if (p->placed > 0 && oldest == p->first_placed)
        return CHUNK_FULL; /* the chunk has wrapped around to itself */
    if (oldest < 0 || p->freed >= s->nslots)
        return IRREGULAR;
    const Slot *slot = oldest_slot(a, p);
    /* Another id: a writer died after it reused the slot, before the status. */
    int32_t age = (s->youngest_slot - oldest + s->nslots) % s->nslots;
    int32_t id = s->youngest_id - age + (s->youngest_id < age ? ID_COUNT : 0);
    if (slot == NULL || slot->active != 1 || slot->id != id || slot->offset != s->end_insert ||
        slot->stored_len < FRAME_EXTRA || slot->stored_len > s->begin_append - s->end_insert ||
        (slot->checksum != 0 && slot->checksum != slot_checksum(slot)))
        return IRREGULAR;
    /* The reader has not read it yet; or it read it last (or nothing: 0 means both) and has
     * others to read. */
    if (guarded && (id == next_id(s->last_id_read) ||
                    (id == s->last_id_read && id != p->published)))
        return WAIT;
    s->end_insert += slot->stored_len;
    if (s->end_insert >= s->begin_append) { /* the gap has reached the tail */
        s->begin_append = s->begin_insert;
        s->begin_insert = s->end_insert = 0;
        s->append_mode = 1;
    }
    s->oldest_slot = next_slot(s, oldest);
    a->window_start = oldest + 1; /* in the next round, this slot holds another message */
    if (p->freed++ == 0)
        p->first_freed = oldest;
    if (p->runs > 0 && p->runs <= MOST_RUNS && p->reused[p->runs - 1].end == slot->offset)
        p->reused[p->runs - 1].end += slot->stored_len;
    else if (p->runs++ < MOST_RUNS)
        p->reused[p->runs - 1] = (Run){slot->offset, slot->offset + slot->stored_len};
    return WRITTEN;
}

/* Steps 2 to 8: find the place of one message, in the plan. */
static enum Outcome place(Appender *a, Plan *p, Entry *e, bool blocking)
{
    Status *s = &p->status;
    int32_t index = next_slot(s, s->youngest_slot), id = next_id(s->youngest_id);
    if (e->payload.len > s->buf_size || e->msg_len > s->buf_size)
        return TOO_LARGE;
    int32_t padded = (int32_t)((e->payload.len + 3) & ~(Py_ssize_t)3);
    int32_t stored = padded + FRAME_EXTRA;
    if (stored > s->buf_size)
        return TOO_LARGE;
    if (blocking) {
        int32_t overwritten = id - s->nslots;
        if ((overwritten < 0 ? overwritten + ID_COUNT : overwritten) == s->last_id_read)
            return WAIT;
        s->blocking_write = 1;
    }
    if (index == s->oldest_slot) {
        enum Outcome outcome = evict(a, p, blocking);
        if (outcome != WRITTEN)
            return outcome;
    }
    for (;;) {
        if (s->append_mode) {
            if (s->buf_size - s->begin_append >= stored)
                break;
            s->append_mode = 0;
        } else {
            if (s->end_insert - s->begin_insert >= stored)
                break;
            enum Outcome outcome = evict(a, p, blocking);
            if (outcome != WRITTEN)
                return outcome;
        }
    }
    int32_t *begin = s->append_mode ? &s->begin_append : &s->begin_insert;
    e->index = index;
    e->slot = (Slot){.active = 1, .id = id, .time = e->time, .msg_len = e->msg_len,
                     .stored_len = stored, .offset = *begin, .type = e->type,
                     .subtype = e->subtype, .compress = e->compress};
    e->slot.checksum = slot_checksum(&e->slot);
    put_word(e->head, MESSAGE_MAGIC);
    put_word(e->head + 4, index);
    int32_t padding = padded - (int32_t)e->payload.len;
    memset(e->tail, 0, sizeof e->tail);
    put_word(e->tail + padding, id);
    e->tail_len = padding + 4;
    *begin += stored;
    s->youngest_slot = index;
    s->youngest_id = id;
    if (s->oldest_slot < 0)
        s->oldest_slot = index;
    if (p->placed++ == 0)
        p->first_placed = index;
    return WRITTEN;
}

/* --- writing the plan ----------------------------------------------------------------------- */

/* Write a run of slots around the ring: free ones, or (entries given) the new ones. */
static int write_slots(Appender *a, const Status *s, int32_t first, int32_t n, const Entry *entries)
{
    Slot out[WINDOW_SLOTS];
    const Slot free_slot = {.checksum = -4}; /* docs/specs/lrose.md 1.4 */
    for (int32_t done = 0; done < n;) {
        int32_t at = (int32_t)(((int64_t)first + done) % s->nslots);
        int32_t run = n - done;
        run = run < s->nslots - at ? run : s->nslots - at;
        run = run < WINDOW_SLOTS ? run : WINDOW_SLOTS;
        for (int32_t i = 0; i < run; i++)
            out[i] = entries ? entries[done + i].slot : free_slot;
        swap_words(out, (size_t)run * SLOT_SIZE / 4);
        off_t place = STATUS_SIZE + (off_t)SLOT_SIZE * at;
        if (in_memory(a)) {
            atomic_thread_fence(memory_order_release);
            store_slots((unsigned char *)a->stat_mem.buf + place, out, run);
        } else if (write_stat(a, out, (size_t)run * SLOT_SIZE, place) != 0) {
            return -1;
        }
        done += run;
    }
    return 0;
}

static int write_messages(Appender *a, Entry *entries, int n)
{
    struct iovec iov[3 * CHUNK_MESSAGES];
    unsigned char frame[SMALL_FRAME];
    if (n == 1 && entries->slot.stored_len <= SMALL_FRAME) { /* one part is cheaper than three */
        size_t length = (size_t)entries->payload.len;
        memcpy(frame, entries->head, FRAME_HEAD);
        memcpy(frame + FRAME_HEAD, entries->payload.buf, length);
        memcpy(frame + FRAME_HEAD + length, entries->tail, (size_t)entries->tail_len);
        return write_part(&a->buf_mem, a->buf_fd, frame, (size_t)entries->slot.stored_len,
                          entries->slot.offset);
    }
    for (int i = 0; i < n;) {
        off_t start = entries[i].slot.offset, end = start;
        int parts = 0;
        for (; i < n && entries[i].slot.offset == end; i++) {
            Entry *e = &entries[i];
            iov[parts++] = (struct iovec){e->head, FRAME_HEAD};
            if (e->payload.len > 0)
                iov[parts++] = (struct iovec){e->payload.buf, (size_t)e->payload.len};
            iov[parts++] = (struct iovec){e->tail, (size_t)e->tail_len};
            end += e->slot.stored_len;
        }
        if (write_frames(a, iov, parts, start) != 0)
            return -1;
    }
    return 0;
}

static int seal_status(Appender *a, Status *s, int32_t now, Status *out)
{
    if (s->blocking_write) { /* a reader reports its progress without a lock: keep the latest */
        if (read_stat(a, &s->last_id_read, 4, offsetof(Status, last_id_read)) != 1)
            return -1;
        swap_words(&s->last_id_read, 1);
    }
    s->time_written = now;
    s->checksum = status_checksum(s);
    *out = *s;
    swap_words(out, STATUS_SIZE / 4);
    return 0;
}

/* Write a run of slots, free ones or those of entries, and the status that goes with them. */
static int publish(Appender *a, Status *s, int32_t now, int32_t first, int32_t n,
                   const Entry *entries)
{
    Status out;
    if (in_memory(a) || s->nslots > SLOTS_IN_PAGE) {
        /* Checksum first: nothing but the two stores between. */
        return seal_status(a, s, now, &out) != 0 || write_slots(a, s, first, n, entries) != 0
                   ? -1
                   : write_stat(a, &out, STATUS_SIZE, 0);
    }
    unsigned char page[PAGE];
    size_t whole = STATUS_SIZE + (size_t)SLOT_SIZE * (size_t)s->nslots;
    if (read_stat(a, page, whole, 0) != 1)
        return -1;
    for (int32_t i = 0; i < n; i++) {
        Slot slot = entries ? entries[i].slot : (Slot){.checksum = -4};
        swap_words(&slot, SLOT_SIZE / 4);
        int32_t at = (int32_t)(((int64_t)first + i) % s->nslots);
        memcpy(page + STATUS_SIZE + (size_t)at * SLOT_SIZE, &slot, SLOT_SIZE);
    }
    if (seal_status(a, s, now, &out) != 0)
        return -1;
    memcpy(page, &out, STATUS_SIZE);
    return write_stat(a, page, whole, 0);
}

/* Whether a chunk overwrites the bytes of the messages that are freed for it. If not, no reader
 * can see a torn message, and slots that are reused at once need not be marked free in between. */
static bool reuses_bytes(const Appender *a, const Plan *p)
{
    if (p->freed > p->placed || (p->freed > 0 && p->first_freed != p->first_placed) ||
        p->runs > MOST_RUNS)
        return true;
    for (int i = 0; i < p->placed; i++) {
        const Slot *new = &a->entries[i].slot;
        for (int run = 0; run < p->runs; run++)
            if (new->offset < p->reused[run].end &&
                p->reused[run].begin < new->offset + new->stored_len)
                return true;
    }
    return false;
}

/* Free the slots of a plan, and update the status unless no message is left. */
static int free_slots(Appender *a, Plan *p, int32_t now)
{
    Status s = p->found;
    s.oldest_slot = p->status.oldest_slot;
    const Slot *oldest = p->freed >= p->live ? NULL : oldest_slot(a, p);
    if (oldest == NULL)
        return write_slots(a, &p->status, p->first_freed, p->freed, NULL);
    if (oldest->offset < s.end_insert) { /* the gap has reached the tail */
        s.begin_append = s.begin_insert;
        s.begin_insert = 0;
        s.append_mode = 1;
    }
    s.end_insert = oldest->offset;
    return publish(a, &s, now, p->first_freed, p->freed, NULL);
}

static enum Outcome append_locked(Appender *a, int n, int32_t now, bool blocking, int *written,
                                  int32_t *last_id)
{
    Plan p = {0};
    if (is_gone(a))
        return GONE;
    if (read_stat(a, &p.status, STATUS_SIZE, 0) != 1)
        return IRREGULAR;
    swap_words(&p.status, STATUS_SIZE / 4);
    if (memcmp(&p.status, &a->written, STATUS_SIZE) != 0)
        a->window_start = a->window_end = 0;
    memset(&a->written, 0, STATUS_SIZE);
    if (!is_sane(&p.status) ||
        (in_memory(a) && (STATUS_SIZE + (int64_t)SLOT_SIZE * p.status.nslots > a->stat_mem.len ||
                          p.status.buf_size > a->buf_mem.len)))
        return IRREGULAR;
    if (is_all_freed(&p.status))
        p.status.oldest_slot = -1; /* none: the next message will be the oldest */
    p.found = p.status;
    p.published = p.status.youngest_id;
    p.published_slot = p.status.youngest_slot;
    if (p.status.oldest_slot >= 0)
        p.live = (p.status.youngest_slot - p.status.oldest_slot + p.status.nslots) %
                     p.status.nslots + 1;

    /* A chunk replaces older messages before it is readable itself. So it is limited to a small
     * part of the queue: slow readers, and all readers after a crash here, keep most of it. */
    enum Outcome outcome = WRITTEN;
    int64_t bytes = 0, most_bytes = p.status.buf_size / 4;
    int most = p.status.nslots / 4 > 1 ? p.status.nslots / 4 : 1;
    most = most < n ? most : n;
    most_bytes = most_bytes < CHUNK_BYTES ? most_bytes : CHUNK_BYTES;
    for (int i = 0; i < most && (i == 0 || bytes < most_bytes); i++) {
        Plan before = p;
        outcome = place(a, &p, &a->entries[i], blocking);
        if (outcome != WRITTEN) { /* this one waits; write those before it */
            p = before;
            break;
        }
        bytes += a->entries[i].slot.stored_len;
    }
    if (p.placed == 0 || outcome == IRREGULAR)
        return outcome;
    if ((p.freed > 0 && reuses_bytes(a, &p) && free_slots(a, &p, now) != 0) ||
        write_messages(a, a->entries, p.placed) != 0 ||
        publish(a, &p.status, now, p.first_placed, p.placed, a->entries) != 0)
        return OS_ERROR;
    a->written = p.status;
    *written = p.placed;
    *last_id = p.status.youngest_id;
    return WRITTEN;
}

/* --- Python --------------------------------------------------------------------------------- */

static int read_int32(PyObject *value, int32_t *to)
{
    long long n = PyLong_AsLongLong(value);
    if (n == -1 && PyErr_Occurred())
        return -1;
    if (n < INT32_MIN || n > INT32_MAX) {
        PyErr_Format(PyExc_OverflowError, "%lld does not fit in 32 bits", n);
        return -1;
    }
    *to = (int32_t)n;
    return 0;
}

/* An entry is the tuple (payload, msg_len, type, subtype, time, compress). */
static int read_entry(PyObject *item, Entry *e)
{
    if (!PyTuple_Check(item) || PyTuple_GET_SIZE(item) != 6) {
        PyErr_SetString(PyExc_TypeError, "an entry is a tuple of six");
        return -1;
    }
    int32_t *fields[] = {&e->msg_len, &e->type, &e->subtype, &e->time, &e->compress};
    for (int i = 0; i < 5; i++)
        if (read_int32(PyTuple_GET_ITEM(item, i + 1), fields[i]) != 0)
            return -1;
    return PyObject_GetBuffer(PyTuple_GET_ITEM(item, 0), &e->payload, PyBUF_SIMPLE);
}

/* Append the first n entries under the lock; an outcome, or -1 with an exception set. */
static int append_chunk(Appender *a, int n, int32_t now, bool blocking, bool held, int *written,
                        int32_t *last_id)
{
    enum Outcome outcome;
    int saved_errno = 0;
    if (a->forks != forks)
        return FORKED;
    a->busy = true;
    Py_BEGIN_ALLOW_THREADS
    if (!held && set_lock(a, F_WRLCK) != 0) {
        outcome = errno == EAGAIN || errno == EACCES ? BUSY : OS_ERROR;
        saved_errno = errno;
    } else {
        outcome = append_locked(a, n, now, blocking, written, last_id);
        saved_errno = errno;
        if (!held)
            set_lock(a, F_UNLCK);
    }
    Py_END_ALLOW_THREADS
    a->busy = false;
    if (outcome != OS_ERROR)
        return (int)outcome;
    errno = saved_errno;
    PyErr_SetFromErrno(PyExc_OSError);
    return -1;
}

static int refuse_second_thread(const Appender *a)
{
    if (!a->busy)
        return 0;
    PyErr_SetString(second_thread, "a writer is not safe to share between threads: "
                                   "give each its own, or a lock");
    return -1;
}

static PyObject *Appender_append(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    Appender *a = (Appender *)self;
    int32_t now;
    if (nargs != 5 || !PyList_Check(args[0]))
        return PyErr_Format(PyExc_TypeError, "append(entries: list, start, now, blocking, held)");
    Py_ssize_t start = PyLong_AsSsize_t(args[1]), total = PyList_GET_SIZE(args[0]);
    int blocking = PyObject_IsTrue(args[3]), held = PyObject_IsTrue(args[4]);
    if (PyErr_Occurred() || refuse_second_thread(a) != 0)
        return NULL;
    a->count = 0;
    if (read_int32(args[2], &now) != 0)
        return NULL;
    if (start < 0 || start >= total)
        return PyErr_Format(PyExc_IndexError, "there is no entry %zd", start);
    int want = (int)(total - start < CHUNK_MESSAGES ? total - start : CHUNK_MESSAGES);
    int n = 0, outcome = -1;
    for (; n < want; n++)
        if (read_entry(PyList_GET_ITEM(args[0], start + n), &a->entries[n]) != 0)
            break;
    if (n == want)
        outcome = append_chunk(a, n, now, blocking, held, &a->count, &a->last_id);
    for (int i = 0; i < n; i++)
        PyBuffer_Release(&a->entries[i].payload);
    return outcome < 0 ? NULL : PyLong_FromLong(outcome);
}

/* The fast path for one plain message, a part of a buffer. */
static PyObject *Appender_append_one(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    Appender *a = (Appender *)self;
    Entry *e = a->entries;
    if (nargs != 7)
        return PyErr_Format(PyExc_TypeError,
                            "append_one(buffer, begin, end, type, subtype, now, blocking)");
    Py_ssize_t begin = PyLong_AsSsize_t(args[1]), end = PyLong_AsSsize_t(args[2]);
    int blocking = PyObject_IsTrue(args[6]);
    if (PyErr_Occurred() || refuse_second_thread(a) != 0)
        return NULL;
    a->count = 0;
    if (read_int32(args[3], &e->type) != 0 || read_int32(args[4], &e->subtype) != 0 ||
        read_int32(args[5], &e->time) != 0)
        return NULL;
    Py_buffer whole;
    if (PyObject_GetBuffer(args[0], &whole, PyBUF_SIMPLE) != 0)
        return NULL;
    int outcome = TOO_LARGE;
    if (begin < 0 || end < begin || end > whole.len) {
        outcome = -1;
        PyErr_SetString(PyExc_IndexError, "the message is not in the buffer");
    } else if (end - begin <= INT32_MAX) {
        e->payload = whole; /* not a view of its own: `whole` is released */
        e->payload.buf = (char *)whole.buf + begin;
        e->payload.len = end - begin;
        e->msg_len = (int32_t)(end - begin);
        e->compress = 0;
        outcome = append_chunk(a, 1, e->time, blocking, false, &a->count, &a->last_id);
    }
    PyBuffer_Release(&whole);
    return outcome < 0 ? NULL : PyLong_FromLong(outcome);
}

static int Appender_init(PyObject *self, PyObject *args, PyObject *kwargs)
{
    Appender *a = (Appender *)self;
    static char *names[] = {"lock_fd", "stat_fd", "buf_fd", "stat_mem", "buf_mem",
                            "shm_key", "stat_shm_id", "buf_shm_id", NULL};
    if (a->entries != NULL) {
        PyErr_SetString(PyExc_RuntimeError, "an Appender is made once");
        return -1;
    }
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "i|$iiw*w*iii", names, &a->lock_fd, &a->stat_fd,
                                     &a->buf_fd, &a->stat_mem, &a->buf_mem, &a->shm_key,
                                     &a->stat_shm_id, &a->buf_shm_id))
        return -1;
    a->forks = forks;
    a->entries = PyMem_Calloc(CHUNK_MESSAGES, sizeof(Entry));
    return a->entries == NULL ? (PyErr_NoMemory(), -1) : 0;
}

static void Appender_dealloc(PyObject *self)
{
    Appender *a = (Appender *)self;
    PyTypeObject *type = Py_TYPE(self);
    PyBuffer_Release(&a->stat_mem);
    PyBuffer_Release(&a->buf_mem);
    PyMem_Free(a->entries);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMethodDef Appender_methods[] = {
    {"append", (PyCFunction)(void (*)(void))Appender_append, METH_FASTCALL,
     "append(entries, start, now, blocking, held) -> outcome"},
    {"append_one", (PyCFunction)(void (*)(void))Appender_append_one, METH_FASTCALL,
     "append_one(buffer, begin, end, type, subtype, now, blocking) -> outcome"},
    {NULL, NULL, 0, NULL}};

/* The outcome is a small integer, which needs no allocation. If count and id were returned with it, a
 * call that has written could fail without memory, and its messages would not be counted. */
static PyMemberDef Appender_members[] = {
    {"count", T_INT, offsetof(Appender, count), READONLY, "messages that the last call wrote"},
    {"last_id", T_INT, offsetof(Appender, last_id), READONLY, "the id of the last of them"},
    {NULL, 0, 0, 0, NULL}};

static PyType_Slot Appender_slots[] = {{Py_tp_init, Appender_init},
                                       {Py_tp_dealloc, Appender_dealloc},
                                       {Py_tp_methods, Appender_methods},
                                       {Py_tp_members, Appender_members},
                                       {Py_tp_new, PyType_GenericNew},
                                       {0, NULL}};

static PyType_Spec Appender_spec = {.name = "penstock.queue.classic._appender.Appender",
                                    .basicsize = sizeof(Appender),
                                    .flags = Py_TPFLAGS_DEFAULT,
                                    .slots = Appender_slots};

static int module_exec(PyObject *module)
{
    if (pthread_atfork(NULL, NULL, count_fork) != 0) {
        PyErr_NoMemory();
        return -1;
    }
    second_thread = PyErr_NewException("penstock.queue.classic._appender.SecondThread",
                                       PyExc_RuntimeError, NULL);
    if (second_thread == NULL || PyModule_AddObjectRef(module, "SecondThread", second_thread) != 0)
        return -1;
    PyObject *type = PyType_FromSpec(&Appender_spec);
    if (type == NULL || PyModule_AddObjectRef(module, "Appender", type) != 0) {
        Py_XDECREF(type);
        return -1;
    }
    Py_DECREF(type);
    return PyModule_AddIntConstant(module, "WRITTEN", WRITTEN) ||
           PyModule_AddIntConstant(module, "BUSY", BUSY) ||
           PyModule_AddIntConstant(module, "GONE", GONE) ||
           PyModule_AddIntConstant(module, "IRREGULAR", IRREGULAR) ||
           PyModule_AddIntConstant(module, "TOO_LARGE", TOO_LARGE) ||
           PyModule_AddIntConstant(module, "WAIT", WAIT) ||
           PyModule_AddIntConstant(module, "FORKED", FORKED) ? -1 : 0;
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, module_exec}, {0, NULL}};

static struct PyModuleDef module_def = {PyModuleDef_HEAD_INIT, .m_name = "_appender",
                                        .m_slots = module_slots};

PyMODINIT_FUNC PyInit__appender(void) { return PyModuleDef_Init(&module_def); }
