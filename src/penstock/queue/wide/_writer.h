/* How are messages placed in a wide queue and published, one or many a call?
 *
 * A part of _ring.c: `RingWriter`, the base of the writer.
 */

/* Messages of a log, on their way into its file. */
typedef struct {
    penstock_slot slots[4096];
    uint8_t bytes[256 << 10];
} Run;

typedef struct {
    Mapped mapped;
    penstock_writer w;
    Run *run; /* NULL: none was needed yet */
    int64_t lock_timeout;
    bool sync_each, locked, reserved;
    penstock_slot pending; /* of the reservation */
    int64_t looked;        /* when the path was last checked by Python */
    uint64_t messages, bytes, refused;
} Writer;

/* A message to be appended. */
typedef struct {
    penstock_slot slot;
    const uint8_t *stream, *attributes, *payload;
    const uint8_t *block; /* stream, attributes and origin as they are stored, or NULL */
    int64_t origin_ns;    /* with PENSTOCK_HAS_ORIGIN */
} Entry;

static int hook(Writer *self, const char *name, long code, uint64_t bytes) {
    Py_XDECREF(PyObject_CallMethod((PyObject *)self, name, "lK", code, bytes));
    return PyErr_Occurred() ? -1 : 0;
}

/* Take the lock of many writers. */
static int take_lock(Writer *self) {
    if (self->w.number == 0 || self->locked)
        return 0;
    int error = penstock_lock(&self->w, 0);
    int64_t deadline = error == 0 ? 0 : penstock_clock(CLOCK_MONOTONIC) + self->lock_timeout;
    while (error != 0) {
        int64_t left = deadline - penstock_clock(CLOCK_MONOTONIC);
        if ((error == EINTR && PyErr_CheckSignals() != 0) ||
            (left <= 0 && hook(self, "_lock_timed_out", 0, 0) != 0))
            return -1;
        Py_BEGIN_ALLOW_THREADS
        error = penstock_lock(&self->w, left < SLICE ? left : SLICE);
        Py_END_ALLOW_THREADS
    }
    self->locked = true;
    penstock_code code = penstock_take_over(&self->w);
    return code == PENSTOCK_OK ? 0 : hook(self, "_make_room", code, 0);
}

static void give_lock(Writer *self) {
    if (self->locked && !self->reserved) {
        self->locked = false;
        penstock_unlock(&self->w);
    }
}

/* Let Python check the path, once a second at most. Before a message is placed: a writer that was silent
 * for long would put its next one into a queue that was removed meanwhile. */
static int look_at_path(Writer *self) {
    int64_t now = penstock_clock(CLOCK_MONOTONIC_COARSE);
    if (now - self->looked <= SLICE)
        return 0;
    self->looked = now;
    return hook(self, "_look", 0, 0);
}

static bool writer_enter(Writer *self) {
    if (!enter(&self->mapped))
        return false;
    if (self->reserved)
        PyErr_SetString(PyExc_RuntimeError, "a reservation is under way: commit or abort it first");
    else if (look_at_path(self) == 0 && take_lock(self) == 0)
        return true;
    give_lock(self);
    self->mapped.busy = false;
    if (self->mapped.closing)
        close_now((PyObject *)self);
    return false;
}

/* Make room for a message, and return its address, or NULL. */
static uint8_t *make_room(Writer *self, const Entry *e) {
    uint64_t size = e->slot.block + e->slot.length;
    uint8_t *to;
    penstock_code code;
    while ((code = penstock_begin(&self->w, size, &to)) != PENSTOCK_OK) {
        if (is_cut(&self->mapped)) /* what was placed is lost: `conclude` says so */
            return NULL;
        penstock_publish(&self->w); /* so that held readers can advance */
        if (hook(self, "_make_room", code, size) != 0)
            return NULL;
    }
    return to;
}

/* Make room for a message, write its block, and return the address of its payload, or NULL. */
static uint8_t *begin(Writer *self, const Entry *e) {
    const penstock_slot *slot = &e->slot;
    uint8_t *to = make_room(self, e);
    if (to == NULL)
        return NULL;
    PENSTOCK_FAULT_POINT();
    if (e->block != NULL) {
        memcpy(to, e->block, slot->block);
    } else if (slot->block > 0) {
        uint32_t origin = slot->flags & PENSTOCK_HAS_ORIGIN ? 8 : 0, rest = slot->block - origin;
        if (origin > 0)
            memcpy(to + rest, &e->origin_ns, 8);
        if (rest > 0)
            memset(to + rest - 8, 0, 8); /* the padding */
        if (e->stream != NULL)
            memcpy(to, e->stream, 16);
        PENSTOCK_FAULT_POINT();
        if (slot->attributes > 0)
            memcpy(to + (e->stream == NULL ? 0 : 16), e->attributes, slot->attributes);
    }
    return to + slot->block;
}

/* Place one message; the caller publishes it. */
static int append(Writer *self, Entry *e) {
    uint8_t *to = begin(self, e);
    if (to == NULL)
        return -1;
    PENSTOCK_FAULT_POINT();
    copy_payload(to, e->payload, e->slot.length);
    penstock_finish(&self->w, &e->slot);
    self->bytes += e->slot.length;
    return 0;
}

/* End a write call: publish, count, sync. Returns the last number, or NULL. */
static PyObject *conclude(Writer *self, int failed, uint64_t offered, uint64_t done) {
    if (is_cut(&self->mapped)) { /* placed messages may be lost */
        done -= self->w.planned < done ? self->w.planned : done;
        self->w.planned = 0;
        raise_cut((PyObject *)self);
        failed = 1;
    }
    penstock_publish(&self->w);
    uint64_t last = self->w.head - 1;
    give_lock(self);
    self->messages += done;
    self->refused += offered - done;
    if (!failed && self->sync_each)
        hook(self, "_sync", 0, 0);
    self->mapped.busy = false; /* not earlier: a thread that closes meanwhile leaves that to this one */
    if (self->mapped.closing)
        close_now((PyObject *)self);
    return PyErr_Occurred() ? NULL : PyLong_FromUnsignedLongLong(last);
}

/* The header fields of a message, from arguments type .. origin_ns. */
static bool parse_header(PyObject **given, Entry *e) {
    int64_t type = 0, subtype = 0;
    PyObject *stream = given[4], *attributes = given[5], *origin = given[6];
    e->slot.time_ns = e->slot.created_ns = penstock_clock(CLOCK_REALTIME);
    if (!int_argument(given[0], "type", INT32_MIN, INT32_MAX, &type) ||
        !int_argument(given[1], "subtype", INT32_MIN, INT32_MAX, &subtype) ||
        !int_argument(given[2], "time_ns", INT64_MIN, INT64_MAX, &e->slot.time_ns) ||
        !int_argument(given[3], "created_ns", INT64_MIN, INT64_MAX, &e->slot.created_ns) ||
        !int_argument(origin, "origin_ns", INT64_MIN, INT64_MAX, &e->origin_ns))
        return false;
    e->slot.type = (int32_t)type;
    e->slot.subtype = (int32_t)subtype;
    if (stream != NULL && stream != Py_None) {
        if (!PyBytes_Check(stream) || PyBytes_GET_SIZE(stream) != 16)
            return PyErr_SetString(PyExc_TypeError, "stream is a StreamId of 16 bytes"), false;
        e->stream = (const uint8_t *)PyBytes_AS_STRING(stream);
        e->slot.flags |= PENSTOCK_HAS_STREAM;
        e->slot.block = 16;
    }
    if (attributes != NULL && attributes != Py_None) {
        if (!PyBytes_Check(attributes) || PyBytes_GET_SIZE(attributes) > INT32_MAX)
            return PyErr_SetString(PyExc_TypeError, "attributes are bytes, below 2 GiB"), false;
        e->attributes = (const uint8_t *)PyBytes_AS_STRING(attributes);
        e->slot.flags |= PENSTOCK_HAS_ATTRIBUTES;
        e->slot.attributes = (uint32_t)PyBytes_GET_SIZE(attributes);
    }
    e->slot.block = (uint32_t)penstock_align(e->slot.block + e->slot.attributes, 8);
    if (origin != NULL && origin != Py_None) {
        e->slot.flags |= PENSTOCK_HAS_ORIGIN;
        e->slot.block += 8;
    }
    return true;
}

/* Append one payload. The fast case, bytes, needs no buffer. */
static int offer(Writer *self, PyObject *payload, Entry *e) {
    if (PyBytes_CheckExact(payload)) {
        e->payload = (const uint8_t *)PyBytes_AS_STRING(payload);
        e->slot.length = (uint64_t)PyBytes_GET_SIZE(payload);
        return append(self, e);
    }
    Py_buffer view;
    if (PyObject_GetBuffer(payload, &view, PyBUF_SIMPLE) != 0)
        return -1;
    e->payload = view.buf;
    e->slot.length = (uint64_t)view.len;
    int failed = append(self, e);
    PyBuffer_Release(&view);
    return failed;
}

static PyObject *writer_write(Writer *self, PyObject *const *args, Py_ssize_t n, PyObject *keywords) {
    static const char *const names[] = {"payload",    "type",   "subtype",   "time_ns",
                                        "created_ns", "stream", "attributes", "origin_ns"};
    PyObject *given[8];
    Entry e = {0};
    if (!parse_arguments(names, 8, args, n, keywords, given))
        return NULL;
    if (!parse_header(given + 1, &e) || !writer_enter(self))
        return self->refused++, NULL;
    int failed = offer(self, given[0], &e);
    return conclude(self, failed, 1, failed ? 0 : 1);
}

static PyObject *writer_write_many(Writer *self, PyObject *const *args, Py_ssize_t n, PyObject *keywords) {
    static const char *const names[] = {"payloads", "type", "subtype"};
    PyObject *given[8] = {NULL};
    Entry e = {0};
    if (!parse_arguments(names, 3, args, n, keywords, given))
        return NULL;
    PyObject *items = PySequence_Tuple(given[0]); /* a private copy that no thread can change */
    if (items == NULL)
        return NULL;
    uint64_t count = (uint64_t)PyTuple_GET_SIZE(items), done = 0;
    bool ready = count > 0 && parse_header(given + 1, &e) && writer_enter(self);
    int failed = 0;
    while (ready && !failed && done < count) {
        failed = offer(self, PyTuple_GET_ITEM(items, (Py_ssize_t)done), &e);
        done += failed == 0;
    }
    Py_DECREF(items);
    if (count == 0)
        Py_RETURN_NONE;
    if (ready)
        return conclude(self, failed, count, done);
    return self->refused += count, NULL;
}

/* write_split(data, ending, type, subtype): append the parts between endings, without an object for each. */
static PyObject *writer_write_split(Writer *self, PyObject *const *args, Py_ssize_t n, PyObject *keywords) {
    static const char *const names[] = {"data", "ending", "type", "subtype"};
    PyObject *given[9] = {NULL};
    Entry e = {0};
    if (!parse_arguments(names, 4, args, n, keywords, given))
        return NULL;
    if (!PyBytes_Check(given[0]) || given[1] == NULL || !PyBytes_Check(given[1]) || PyBytes_GET_SIZE(given[1]) == 0)
        return PyErr_SetString(PyExc_TypeError, "data and ending are bytes, and the ending has some"), NULL;
    const char *at = PyBytes_AS_STRING(given[0]), *end = at + PyBytes_GET_SIZE(given[0]);
    const char *ending = PyBytes_AS_STRING(given[1]), *found;
    size_t size = (size_t)PyBytes_GET_SIZE(given[1]);
    uint64_t offered = 0, done = 0;
    bool ready = parse_header(given + 2, &e) && writer_enter(self);
    int failed = !ready;
    do { /* after a failure, the rest is only counted as refused */
        found = size == 1 ? memchr(at, *ending, (size_t)(end - at)) : memmem(at, (size_t)(end - at), ending, size);
        e.payload = (const uint8_t *)at;
        e.slot.length = (uint64_t)((found == NULL ? end : found) - at);
        failed = failed || append(self, &e) != 0;
        done += failed == 0;
        offered++;
        at = found == NULL ? end : found + size;
    } while (found != NULL);
    if (ready)
        return conclude(self, failed, offered, done);
    return self->refused += offered, NULL;
}

/* write_parts(data, places): append the parts of data at the places, each two numbers of 64 bits: where it begins
 * and ends. There is no object for each. */
static PyObject *writer_write_parts(Writer *self, PyObject *args) {
    Py_buffer data, places;
    if (!PyArg_ParseTuple(args, "y*y*", &data, &places))
        return NULL;
    uint64_t count = (uint64_t)places.len / (2 * sizeof(int64_t)), done = 0;
    PyObject *header[7] = {NULL};
    Entry e = {0};
    bool ready = count > 0 && parse_header(header, &e) && writer_enter(self);
    int failed = 0;
    while (ready && !failed && done < count) {
        const int64_t *place = (int64_t *)places.buf + 2 * done;
        failed = place[0] < 0 || place[1] < place[0] || place[1] > data.len;
        if (failed) {
            PyErr_SetString(PyExc_ValueError, "a place outside of the data");
            break;
        }
        e.payload = (uint8_t *)data.buf + place[0];
        e.slot.length = (uint64_t)(place[1] - place[0]);
        failed = append(self, &e);
        done += failed == 0;
    }
    PyBuffer_Release(&data);
    PyBuffer_Release(&places);
    if (count == 0)
        Py_RETURN_NONE;
    if (ready)
        return conclude(self, failed, count, done);
    return self->refused += count, NULL;
}

/* Rows that Python prepared: their slots, blocks and payloads, and how much of each is placed. */
typedef struct {
    Py_buffer slots, blocks, payloads;
    uint64_t count, done, block, payload;
} Rows;

/* The next row; false: its bytes are missing. */
static bool next_row(const Rows *rows, Entry *e) {
    memset(e, 0, sizeof *e);
    memcpy(&e->slot, (penstock_slot *)rows->slots.buf + rows->done, sizeof e->slot);
    e->block = (uint8_t *)rows->blocks.buf + rows->block;
    e->payload = (uint8_t *)rows->payloads.buf + rows->payload;
    return e->slot.block <= (uint64_t)rows->blocks.len - rows->block &&
           e->slot.length <= (uint64_t)rows->payloads.len - rows->payload;
}

static void row_is_placed(Rows *rows, const Entry *e) {
    rows->done++;
    rows->block += e->slot.block;
    rows->payload += e->slot.length;
}

static bool put(int fd, const void *from, uint64_t bytes, const void *to, const void *base) {
    off_t at = (const uint8_t *)to - (const uint8_t *)base;
    while (bytes > 0) {
        ssize_t n = pwrite(fd, from, bytes, at);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return false;
        from = (const uint8_t *)from + n, at += n, bytes -= (uint64_t)n;
    }
    return true;
}

/* Whether the file is still as long as its mapping. If not, all calls fail from now on: a part of what was cut off may
 * be added again, and then no access to it would fail. */
static bool is_whole(const Writer *self) {
    struct stat file;
    bool whole = fstat(self->w.fd, &file) == 0 && file.st_size >= self->mapped.memory.len;
    if (!whole && self->mapped.area != NULL)
        __atomic_store_n(&self->mapped.area->is_cut, 1, __ATOMIC_RELEASE);
    return whole;
}

/* Bring the `count` messages of the run, which begin at this position of the buffer, to their places in the file. */
static bool put_run(Writer *self, uint64_t count, uint64_t position, uint64_t bytes) {
    const penstock_ring *ring = &self->w.ring;
    const penstock_slot *slots = self->run->slots;
    const void *base = self->mapped.memory.buf;
    uint64_t first = self->w.head & ring->mask, room = ring->mask + 1 - first;
    uint64_t straight = count < room ? count : room; /* the slots after them are at the start of the table */
    if (!is_whole(self))
        return false;
    PENSTOCK_FAULT_POINT();
    bool done = put(self->w.fd, self->run->bytes, bytes, ring->buffer + position, base);
    PENSTOCK_FAULT_POINT();
    done = done && put(self->w.fd, slots, straight * sizeof *slots, ring->slots + first, base) &&
           put(self->w.fd, slots + straight, (count - straight) * sizeof *slots, ring->slots, base);
    PENSTOCK_FAULT_POINT();
    return done && is_whole(self);
}

/* Append the next rows to a log by pwrite, as many as a run has room for: a page fault for each new page would take
 * longer than all the rest. False: none, and the next row is for `append`. Needs no interpreter's lock. */
static bool append_run(Writer *self, Rows *rows) {
    penstock_writer *w = &self->w, before;
    Rows rows_before = *rows;
    uint64_t count = 0, bytes = 0;
    Entry e;
    penstock_publish(w);
    before = *w;
    /* Up to the end of the allocated space, and not into the last page: a truncated file is still shorter afterwards. */
    uint64_t end = w->ring.buffer_size - PENSTOCK_PAGE, most = sizeof self->run->slots / sizeof *self->run->slots;
    end = w->ready_position < end ? w->ready_position : end;
    uint64_t slots = w->tail + w->ring.mask + 1 - w->head, ready = w->ready_seq - w->head;
    most = slots < most ? slots : most;
    most = ready < most ? ready : most;
    while (rows->done < rows->count && count < most && next_row(rows, &e)) {
        uint64_t size = e.slot.block + e.slot.length, room = penstock_align(size, PENSTOCK_ALIGN);
        uint8_t *to = self->run->bytes + bytes;
        if (size > sizeof self->run->bytes - bytes || w->position + room > end)
            break;
        memcpy(to, e.block, e.slot.block);
        memcpy(to + e.slot.block, e.payload, e.slot.length);
        memset(to + size, 0, room - size);
        w->at = w->position;
        penstock_finish_at(w, &e.slot, to, &self->run->slots[count++]);
        row_is_placed(rows, &e);
        bytes += room;
    }
    if (count > 0 && put_run(self, count, before.position, bytes)) {
        penstock_publish(w);
        self->bytes += rows->payload - rows_before.payload;
        return true;
    }
    *w = before;
    *rows = rows_before;
    return false;
}

/* Append rows to a log by runs, as long as there is room. False: the next row is for `append`. */
static bool append_runs(Writer *self, Rows *rows) {
    uint64_t left = (uint64_t)rows->payloads.len - rows->payload + (rows->count - rows->done) * sizeof(penstock_slot);
    uint64_t before = rows->done;
    if (left < FEW || !(self->w.ring.header->flags & PENSTOCK_KEEPS))
        return false;
    if (self->run == NULL && (self->run = PyMem_RawMalloc(sizeof *self->run)) == NULL)
        return false; /* there is another way */
    PyThreadState *lock = left < LARGE ? NULL : PyEval_SaveThread();
    while (append_run(self, rows))
        ;
    if (lock != NULL)
        PyEval_RestoreThread(lock);
    return rows->done > before;
}

/* _write_rows(slots, blocks, payloads): append messages that Python prepared, in order. */
static PyObject *writer_write_rows(Writer *self, PyObject *args) {
    Rows rows = {0};
    Entry e;
    if (!PyArg_ParseTuple(args, "y*y*y*", &rows.slots, &rows.blocks, &rows.payloads))
        return NULL;
    rows.count = (uint64_t)rows.slots.len / sizeof(penstock_slot);
    bool ready = writer_enter(self);
    int failed = 0;
    while (ready && !failed && rows.done < rows.count) {
        failed = !next_row(&rows, &e);
        if (failed)
            PyErr_SetString(PyExc_ValueError, "the rows are longer than their bytes");
        else if ((failed = make_room(self, &e) == NULL) || append_runs(self, &rows))
            continue;
        else if ((failed = is_cut(&self->mapped) || append(self, &e) != 0) == 0) {
            row_is_placed(&rows, &e);
            failed = is_cut(&self->mapped); /* before anything is published */
        }
    }
    PyBuffer_Release(&rows.slots);
    PyBuffer_Release(&rows.blocks);
    PyBuffer_Release(&rows.payloads);
    if (ready)
        return conclude(self, failed, rows.count, rows.done);
    return self->refused += rows.count, NULL;
}

/* Make room for a payload of `size` bytes, and return its offset in the mapping. */
static PyObject *writer_reserve(Writer *self, PyObject *args) {
    PyObject *given[7] = {NULL};
    Entry e = {0};
    long long size;
    if (!PyArg_ParseTuple(args, "LOOOOOO", &size, given, given + 1, given + 2, given + 3, given + 4, given + 5))
        return NULL;
    e.slot.length = (uint64_t)size; /* a negative size is too large */
    if (!parse_header(given, &e) || !writer_enter(self))
        return self->refused++, NULL;
    uint8_t *to = begin(self, &e);
    if (to == NULL)
        return conclude(self, 1, 1, 0);
    self->pending = e.slot;
    if (given[3] == Py_None)
        self->pending.created_ns = INT64_MIN; /* set at commit */
    self->reserved = true;
    self->mapped.busy = false;
    return PyLong_FromSsize_t(to - (uint8_t *)self->mapped.memory.buf);
}

/* Publish the first `size` bytes of the reservation; -1 aborts it. */
static PyObject *writer_commit(Writer *self, PyObject *argument) {
    Py_ssize_t length = PyLong_AsSsize_t(argument);
    if ((length == -1 && PyErr_Occurred()) || !enter(&self->mapped))
        return NULL;
    if (!self->reserved || length > (Py_ssize_t)self->pending.length) {
        self->mapped.busy = false;
        return PyErr_SetString(PyExc_ValueError, "there is no reservation of that size"), NULL;
    }
    self->reserved = false;
    if (length >= 0) {
        self->pending.length = (uint64_t)length;
        if (self->pending.created_ns == INT64_MIN)
            self->pending.created_ns = penstock_clock(CLOCK_REALTIME);
        penstock_finish(&self->w, &self->pending);
        self->bytes += (uint64_t)length;
        return conclude(self, 0, 1, 1);
    }
    give_lock(self);
    self->mapped.busy = false;
    Py_RETURN_NONE;
}

/* _attach(mapping, fd, lock_timeout_ns, sync_each): an errno, or 0. */
static PyObject *writer_attach(Writer *self, PyObject *args) {
    PyObject *mapping;
    int fd, sync_each;
    long long lock_timeout;
    penstock_ring ring;
    penstock_writer w;
    if (!PyArg_ParseTuple(args, "OiLp", &mapping, &fd, &lock_timeout, &sync_each))
        return NULL;
    Mapped old = self->mapped; /* a log switches to its next segment */
    int error = EACCES;
    if (map_buffer(&self->mapped, mapping, &ring) && ring.writable)
        error = penstock_writer_claim(&w, ring, fd);
    if (PyErr_Occurred() || error != 0) {
        if (!PyErr_Occurred())
            PyBuffer_Release(&self->mapped.memory);
        self->mapped = old;
        return PyErr_Occurred() ? NULL : PyLong_FromLong(error);
    }
    if (old.memory.obj != NULL)
        PyBuffer_Release(&old.memory);
    self->w = w;
    self->lock_timeout = lock_timeout;
    self->sync_each = sync_each;
    return PyLong_FromLong(0);
}

/* Resume after the last message; False: the queue is damaged. Many writers do it at every write. */
static PyObject *writer_resume(Writer *self, PyObject *Py_UNUSED(ignored)) {
    return PyBool_FromLong(self->w.number != 0 || penstock_resume(&self->w));
}

/* Detach from the queue. False: a thread is writing. A forked process leaves its parent's lock alone. */
static PyObject *writer_detach(Writer *self, PyObject *is_forked) {
    self->mapped.closing = true;
    if (self->mapped.busy && is_forked != Py_True)
        Py_RETURN_FALSE;
    if (self->mapped.memory.obj != NULL) {
        self->reserved = false;
        if (is_forked != Py_True)
            give_lock(self);
        PyBuffer_Release(&self->mapped.memory);
    }
    Py_RETURN_TRUE;
}

/* _wait_for(rows, holders): set the rows of the reader table (32-bit numbers) to wait for. */
static PyObject *writer_wait_for(Writer *self, PyObject *args) {
    Py_buffer rows;
    unsigned int holders;
    if (!PyArg_ParseTuple(args, "y*I", &rows, &holders))
        return NULL;
    penstock_writer *w = &self->w;
    bool fits = (size_t)rows.len <= sizeof w->held && self->mapped.memory.obj != NULL;
    w->held_count = fits ? (uint32_t)(rows.len / 4) : 0;
    memcpy(w->held, rows.buf, 4 * w->held_count);
    PyBuffer_Release(&rows);
    for (uint32_t i = 0; i < w->held_count; i++)
        fits = fits && w->held[i] < w->ring.header->readers;
    if (!fits)
        return w->held_count = 0, PyErr_SetString(PyExc_ValueError, "there are no such readers"), NULL;
    w->holders = holders;
    w->holding = true;
    w->limit = penstock_held(w);
    Py_RETURN_NONE;
}

/* Sleep up to `seconds` until a held reader moves; returns whether one did. */
static PyObject *writer_sleep_for_room(Writer *self, PyObject *argument) {
    double seconds = PyFloat_AsDouble(argument);
    int error;
    Py_BEGIN_ALLOW_THREADS
    error = penstock_sleep_for_room(&self->w, (int64_t)(seconds * 1e9));
    Py_END_ALLOW_THREADS
    if ((error == EINTR && PyErr_CheckSignals() != 0) || self->mapped.closing)
        return PyErr_Occurred() ? NULL : PyObject_CallMethod((PyObject *)self, "_raise_closed", NULL);
    return PyBool_FromLong(penstock_held(&self->w) > self->w.limit);
}

static void writer_dealloc(Writer *self) {
    Py_XDECREF(writer_detach(self, NULL));
    PyMem_RawFree(self->run);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyMethodDef writer_methods[] = {METHOD("write", writer_write, METH_FASTCALL | METH_KEYWORDS),
                                       METHOD("write_many", writer_write_many, METH_FASTCALL | METH_KEYWORDS),
                                       METHOD("write_split", writer_write_split, METH_FASTCALL | METH_KEYWORDS),
                                       METHOD("write_parts", writer_write_parts, METH_VARARGS),
                                       METHOD("_write_rows", writer_write_rows, METH_VARARGS),
                                       METHOD("_reserve", writer_reserve, METH_VARARGS),
                                       METHOD("_commit", writer_commit, METH_O),
                                       METHOD("_attach", writer_attach, METH_VARARGS),
                                       METHOD("_resume", writer_resume, METH_NOARGS),
                                       METHOD("_detach", writer_detach, METH_O),
                                       METHOD("_wait_for", writer_wait_for, METH_VARARGS),
                                       METHOD("_sleep_for_room", writer_sleep_for_room, METH_O),
                                       {0}};

static PyMemberDef writer_members[] = {NUMBER("_messages", Writer, messages), NUMBER("_bytes", Writer, bytes),
                                       NUMBER("_refused", Writer, refused), NUMBER("_head", Writer, w.head),
                                       NUMBER("_position", Writer, w.position), NUMBER("_limit", Writer, w.limit),
                                       NUMBER("_guard", Writer, w.guard),
                                       NUMBER("_ready_position", Writer, w.ready_position),
                                       NUMBER("_ready_seq", Writer, w.ready_seq),
                                       {"_created_ns", T_LONGLONG, offsetof(Writer, w.created_ns), 0, NULL},
                                       {0}};

static PyTypeObject writer_type = TYPE("RingWriter", Writer, .tp_dealloc = (destructor)writer_dealloc,
                                       .tp_methods = writer_methods, .tp_members = writer_members);
