/* How are messages copied out of a wide queue, and what does a reader do that finds none?
 *
 * A part of _ring.c: `RingReader`, the base of the reader.
 */

/* A position, and what was counted before it. */
typedef struct {
    uint64_t next, messages, bytes, filtered;
} Place;

typedef struct {
    Mapped mapped;
    penstock_ring ring;
    PyObject *stream;     /* of the queue, or None */
    PyObject *view;       /* the mapping, read-only, for messages in place */
    int entry;            /* row of the reader table, or -1 */
    bool holds;           /* the writer waits for it */
    uint32_t name_crc;    /* of its row */
    bool filters;         /* only messages of `type` are wanted */
    int32_t type;
    uint64_t epoch;        /* that `next` belongs to */
    uint64_t next;         /* number of the message to read next */
    uint64_t head;         /* cached, to avoid loads of the writer's busy cache line */
    uint64_t acknowledged; /* as in the table */
    int64_t looked;        /* when the path was last checked by Python */
    uint64_t messages, bytes, filtered;
    bool has_taken; /* the last call took messages */
    Place taken;    /* their start, until they are returned */
} Reader;

/* Note where this call's messages start, unless it has taken others already. */
static void begin_taking(Reader *self, const Place *start) {
    if (!self->has_taken)
        self->taken = *start;
    self->has_taken = true;
}

static void go_back(Reader *self, const Place *to) {
    self->next = to->next, self->messages = to->messages;
    self->bytes = to->bytes, self->filtered = to->filtered;
}

/* Store this reader's position in the table: all messages returned before this call are done. */
static void acknowledge(Reader *self) {
    if (self->entry < 0 || self->acknowledged == self->next)
        return;
    self->acknowledged = self->next;
    if (self->holds) {
        penstock_header *h = self->ring.header;
        PENSTOCK_FAULT_POINT();
        penstock_move(&self->ring.readers[self->entry], self->name_crc, self->next);
        PENSTOCK_FAULT_POINT();
        penstock_wake(&h->room_wanted, &h->room_wakes);
    } else
        __atomic_store_n(&self->ring.readers[self->entry].position, self->next, __ATOMIC_RELAXED);
}

/* Create a message from eight fields, which it takes over; NULL if one of them is NULL. */
static PyObject *new_message(PyTypeObject *type, PyObject **fields) {
    bool whole = true;
    for (int i = 0; i < 8; i++)
        whole = whole && fields[i] != NULL;
#if PY_VERSION_HEX < 0x030E0000
    PyObject *message = whole ? type->tp_alloc(type, 8) : NULL;
    for (int i = 0; i < 8; i++)
        if (message != NULL)
            PyTuple_SET_ITEM(message, i, fields[i]);
        else
            Py_XDECREF(fields[i]);
#else /* since 3.14 a tuple caches its hash, which only its constructor initializes */
    PyObject *plain = whole ? PyTuple_New(8) : NULL, *arguments = NULL, *message = NULL;
    for (int i = 0; i < 8; i++)
        if (plain != NULL)
            PyTuple_SET_ITEM(plain, i, fields[i]);
        else
            Py_XDECREF(fields[i]);
    if (plain != NULL && (arguments = PyTuple_Pack(1, plain)) != NULL)
        message = PyTuple_Type.tp_new(type, arguments, NULL);
    Py_XDECREF(arguments);
    Py_XDECREF(plain);
#endif
    return message;
}

/* Create the message of a slot. The caller checks whether it was overwritten meanwhile. */
static PyObject *make_message(Reader *self, const penstock_slot *slot, bool in_place) {
    const uint8_t *from = penstock_bytes(&self->ring, slot);
    const char *block = (const char *)from;
    PyObject *stream = Py_NewRef(self->stream), *attributes = Py_NewRef(Py_None), *payload;
    if (in_place) {
        Py_ssize_t start = from + slot->block - (uint8_t *)self->mapped.memory.buf;
        payload = PySequence_GetSlice(self->view, start, start + (Py_ssize_t)slot->length);
    } else if ((payload = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)slot->length)) != NULL) {
        copy_payload(PyBytes_AS_STRING(payload), from + slot->block, slot->length);
    }
    if (slot->flags & PENSTOCK_HAS_STREAM) {
        Py_SETREF(stream, PyObject_CallFunction(stream_id_type, "y#", block, (Py_ssize_t)16));
        block += 16;
    }
    if (slot->flags & PENSTOCK_HAS_ATTRIBUTES)
        Py_SETREF(attributes, PyBytes_FromStringAndSize(block, slot->attributes));
    PyObject *fields[8] = {PyLong_FromUnsignedLongLong(slot->seq), PyLong_FromLongLong(slot->time_ns),
                           PyLong_FromLongLong(slot->created_ns),  PyLong_FromLong(slot->type),
                           PyLong_FromLong(slot->subtype),         stream,
                           attributes,                             payload};
    bool is_copy = slot->flags & PENSTOCK_HAS_ORIGIN;
    PyObject *message = new_message((PyTypeObject *)(is_copy ? copied_type : message_type), fields);
    if (message != NULL && is_copy) {
        PyObject *origin = PyLong_FromLongLong(penstock_origin(slot, from));
        if (origin == NULL || PyObject_SetAttrString(message, "origin_ns", origin) != 0)
            Py_CLEAR(message);
        Py_XDECREF(origin);
    }
    if (message != NULL && !in_place)
        PyObject_GC_UnTrack(message); /* it is in no cycle, and there may be millions */
    return message;
}

/* Messages up to `oldest` were overwritten: Python counts them as lost, and moves `next` behind them. */
static int lapped(Reader *self, uint64_t oldest) {
    Py_XDECREF(PyObject_CallMethod((PyObject *)self, "_lapped", "K", oldest));
    self->head = penstock_head(&self->ring);
    return PyErr_Occurred() ? -1 : 0;
}

/* Whether the epoch is still the same; recovery starts another. */
static bool is_renumbered(const Reader *self) {
    return __atomic_load_n(&self->ring.header->epoch, __ATOMIC_RELAXED) != self->epoch;
}

/* Let Python map the position to the new epoch. */
static int renumbered(Reader *self) {
    Py_XDECREF(PyObject_CallMethod((PyObject *)self, "_renumbered", NULL));
    self->head = penstock_head(&self->ring);
    return PyErr_Occurred() ? -1 : 1;
}

/* A damaged message: Python raises, or skips it. */
static int damaged(Reader *self, uint64_t seq, const char *what) {
    if (is_cut(&self->mapped))
        return raise_cut((PyObject *)self), -1;
    Py_XDECREF(PyObject_CallMethod((PyObject *)self, "_damaged", "Ks", seq, what));
    return PyErr_Occurred() ? -1 : 1;
}

/* Copy a run of messages to `list`, up to `limit`. Returns 1; 0 if there is no new message, or, with
 * `later`, if an irregular case comes first, which is left to the next call; -1 with an error set. */
static int take_run(Reader *self, PyObject **list, int *count, int limit, bool in_place, bool later) {
    uint64_t first = self->next, end;
    *count = 0;
    if (first >= self->head && first >= (self->head = penstock_head(&self->ring)))
        return is_renumbered(self) && !later ? renumbered(self) : 0;
    end = self->head - first < (uint64_t)limit ? self->head : first + (uint64_t)limit;
    penstock_slot slots[RUN];
    const char *fault = NULL;
    uint64_t seq = first;
    for (; seq < end; seq++) {
        penstock_slot *slot = &slots[*count];
        penstock_load_slot(slot, &self->ring.slots[seq & self->ring.mask]);
        if (!penstock_slot_is_sane(&self->ring, slot, seq))
            fault = "slot";
        else if (!penstock_crc_holds(&self->ring, slot)) /* before its type is used */
            fault = "crc32c";
        if (fault != NULL)
            break;
        if (self->filters && slot->type != self->type)
            continue;
        if ((list[*count] = make_message(self, slot, in_place)) == NULL)
            goto failed;
        ++*count;
    }
    uint64_t resume = first;
    int kept = 0;
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    uint64_t tail = __atomic_load_n(&self->ring.header->tail, __ATOMIC_RELAXED);
    if (is_renumbered(self) || (later && tail > first)) {
        for (int i = 0; i < *count; i++)
            Py_DECREF(list[i]);
        *count = 0;
        return later ? 0 : renumbered(self);
    }
    if (tail > first) {
        if (lapped(self, tail) != 0)
            goto failed;
        resume = self->next;
        fault = NULL;
    }
    self->next = seq > resume ? seq : resume;
    for (int i = 0; i < *count; i++) {
        if (slots[i].seq < resume) {
            Py_DECREF(list[i]);
            continue;
        }
        slots[kept] = slots[i];
        list[kept++] = list[i];
    }
    *count = kept;
    if (self->filters && seq > resume)
        self->filtered += seq - resume - (uint64_t)kept;
    for (int i = 0; i < kept; i++)
        self->bytes += slots[i].length;
    self->messages += (uint64_t)kept;
    if (fault != NULL && kept == 0)
        return later ? 0 : damaged(self, self->next, fault);
    return 1;
failed:
    for (int i = 0; i < *count; i++)
        Py_DECREF(list[i]);
    *count = 0;
    return -1;
}

/* The next wanted message; NULL without an error: there is none now. */
static PyObject *take_one(Reader *self, bool in_place) {
    PyObject *message;
    int count;
    uint64_t stop = UINT64_MAX; /* the current end: otherwise a filter could run forever */
    while (self->next < stop && take_run(self, &message, &count, 1, in_place, false) > 0) {
        if (count > 0)
            return message;
        stop = stop == UINT64_MAX ? penstock_head(&self->ring) : stop;
    }
    return NULL;
}

/* Run pending signal handlers now, while we can still go back. True: one raised, or closed this reader. */
static bool is_interrupted(Reader *self) { return PyErr_CheckSignals() != 0 || self->mapped.closing; }

/* Append available messages to a list, up to `limit`. With `more`, the call has others, and leaves
 * irregular cases to the next one. */
static int take_all(Reader *self, PyObject *messages, Py_ssize_t limit, bool more) {
    PyObject *run[RUN];
    int count, result = 1;
    uint64_t stop = self->head = penstock_head(&self->ring);
    Place before = {0};
    while (result > 0 && self->next < stop && PyList_GET_SIZE(messages) < limit) {
        Py_ssize_t have = PyList_GET_SIZE(messages), left = limit - have;
        if (have == 0)
            before.messages = self->messages, before.bytes = self->bytes, before.filtered = self->filtered;
        result = take_run(self, run, &count, left < RUN ? (int)left : RUN, false, more || have > 0);
        if (have == 0) /* the start of these: losses before them stay counted */
            before.next = self->next - (uint64_t)count - (self->filtered - before.filtered);
        for (int i = 0; i < count; i++) {
            result = PyList_Append(messages, run[i]) == 0 ? result : -1;
            Py_DECREF(run[i]);
        }
    }
    if (result >= 0 && PyList_GET_SIZE(messages) > 0 && is_interrupted(self))
        result = -1;
    if (result < 0 && self->messages > before.messages) /* nothing is returned: read them again later */
        go_back(self, &before);
    else if (PyList_GET_SIZE(messages) > 0)
        begin_taking(self, &before);
    return result;
}

static bool is_ready(const Reader *self) { return penstock_head(&self->ring) > self->next; }

/* While idle: let Python check for another queue or segment. Returns as wait_for_next; 2: keep
 * waiting. */
static int look_around(Reader *self) {
    PyObject *result = PyObject_CallMethod((PyObject *)self, "_idle", NULL);
    Py_XDECREF(result);
    return result == NULL ? -1 : is_ready(self) ? 1 : result == Py_False ? 0 : 2;
}

/* The same, if the last check in any call is at least `between` nanoseconds ago. */
static int look_if_due(Reader *self, int64_t between) {
    int64_t now = penstock_clock(CLOCK_MONOTONIC_COARSE);
    if (now - self->looked < between)
        return 2;
    self->looked = now;
    return look_around(self);
}

/* Wait for a message: 1 there is one, 0 timeout, -1 an error is set. */
static int wait_for_next(Reader *self, int64_t deadline) {
    int result = 2;
    acknowledge(self); /* also skipped messages: the writer may wait for them */
    if (penstock_state(self->ring.header) != PENSTOCK_LIVE &&
        (result = look_around(self)) != 2)
        return result;
    while (!is_ready(self)) {
        int64_t left = deadline - penstock_clock(CLOCK_MONOTONIC);
        if ((result = look_if_due(self, LOOK)) != 2)
            return result;
        if (left <= 0)
            return 0;
        int error;
        Py_BEGIN_ALLOW_THREADS
        error = penstock_sleep(&self->ring, self->next, left < SLICE ? left : SLICE);
        Py_END_ALLOW_THREADS
        if ((error == EINTR && PyErr_CheckSignals() != 0) || self->mapped.closing || is_cut(&self->mapped))
            return -1;
        if (penstock_state(self->ring.header) != PENSTOCK_LIVE && !is_ready(self) &&
            (result = look_around(self)) != 2)
            return result;
    }
    return 1;
}

/* End a call; raise if another thread closed the reader meanwhile. */
static PyObject *leave(Reader *self, PyObject *result) {
    self->mapped.busy = false;
    if (is_cut(&self->mapped)) {
        Py_CLEAR(result);
        raise_cut((PyObject *)self);
    }
    if (!self->mapped.closing)
        return result;
    Py_XDECREF(result);
    close_now((PyObject *)self);
    return PyErr_Occurred() ? NULL : PyObject_CallMethod((PyObject *)self, "_raise_closed", NULL);
}

static PyObject *take_or_wait(Reader *self, PyObject *timeout, bool in_place) {
    int64_t deadline;
    if (!enter(&self->mapped))
        return NULL;
    acknowledge(self);
    self->has_taken = false;
    uint64_t bytes = self->bytes;
    PyObject *message = take_one(self, in_place);
    if (message == NULL && !PyErr_Occurred() && look_if_due(self, LOOK) == 1)
        message = take_one(self, in_place);
    if (message == NULL && !PyErr_Occurred() && parse_timeout(timeout, &deadline))
        while (message == NULL && !PyErr_Occurred() && wait_for_next(self, deadline) > 0)
            message = take_one(self, in_place);
    if (message != NULL) {
        Place before = {self->next - 1, self->messages - 1, bytes, self->filtered};
        begin_taking(self, &before);
        if (is_interrupted(self)) { /* as in take_all: read it again later */
            Py_CLEAR(message);
            go_back(self, &before);
        }
    }
    if (message == NULL && !PyErr_Occurred())
        message = Py_NewRef(Py_None);
    return leave(self, message);
}

static PyObject *reader_read(Reader *self, PyObject *const *args, Py_ssize_t n, PyObject *keywords) {
    static const char *const names[] = {"timeout"};
    PyObject *timeout = NULL;
    if ((n > 0 || keywords != NULL) && !parse_arguments(names, 1, args, n, keywords, &timeout))
        return NULL;
    return take_or_wait(self, timeout, false);
}

/* The next message, with its payload in place in the queue. */
static PyObject *reader_peek(Reader *self, PyObject *timeout) { return take_or_wait(self, timeout, true); }

static PyObject *reader_take(Reader *self, PyObject *argument) {
    Py_ssize_t limit = PyLong_AsSsize_t(argument);
    if ((limit == -1 && PyErr_Occurred()) || !enter(&self->mapped))
        return NULL;
    acknowledge(self);
    self->has_taken = false;
    PyObject *messages = PyList_New(0);
    if (messages != NULL && take_all(self, messages, limit, false) < 0)
        Py_CLEAR(messages);
    if (messages != NULL && PyList_GET_SIZE(messages) == 0 && look_if_due(self, LOOK) == 1 &&
        take_all(self, messages, limit, false) < 0)
        Py_CLEAR(messages);
    if (PyErr_Occurred())
        Py_CLEAR(messages);
    if (messages != NULL && PyList_GET_SIZE(messages) == 0)
        acknowledge(self); /* also skipped messages: the writer may wait for them */
    return leave(self, messages);
}

/* _take_more(limit): more available messages, after some that are not returned to the caller yet. So
 * it neither acknowledges those, nor switches to another queue, nor counts a loss. */
static PyObject *reader_take_more(Reader *self, PyObject *argument) {
    Py_ssize_t limit = PyLong_AsSsize_t(argument);
    if ((limit == -1 && PyErr_Occurred()) || !enter(&self->mapped))
        return NULL;
    PyObject *messages = PyList_New(0);
    if (messages != NULL && take_all(self, messages, limit, true) < 0)
        Py_CLEAR(messages);
    return leave(self, messages);
}

/* _pass(first, count, messages, bytes): advance past `count` messages, and count those that are
 * delivered; the others were filtered out. */
static PyObject *reader_pass(Reader *self, PyObject *args) {
    unsigned long long first, count, messages, bytes;
    if (!PyArg_ParseTuple(args, "KKKK", &first, &count, &messages, &bytes))
        return NULL;
    Place start = {first, self->messages, self->bytes, self->filtered};
    begin_taking(self, &start);
    self->next = first + count;
    self->messages += messages, self->bytes += bytes, self->filtered += count - messages;
    Py_RETURN_NONE;
}

/* Return to the start of what the last call took, and did not return: the next one reads it again. */
static PyObject *reader_put_back(Reader *self, PyObject *Py_UNUSED(ignored)) {
    if (self->has_taken)
        go_back(self, &self->taken);
    self->has_taken = false;
    Py_RETURN_NONE;
}

/* Wait for the next message; False: timeout. */
static PyObject *reader_wait(Reader *self, PyObject *timeout) {
    int64_t deadline;
    if (!parse_timeout(timeout, &deadline) || !enter(&self->mapped))
        return NULL;
    acknowledge(self);
    int ready = is_ready(self) ? 1 : wait_for_next(self, deadline);
    return leave(self, PyErr_Occurred() ? NULL : PyBool_FromLong(ready > 0));
}

/* _look_if_due(seconds): check for another queue, if the last check is at least that long ago. */
static PyObject *reader_look_if_due(Reader *self, PyObject *seconds) {
    double between = PyFloat_AsDouble(seconds);
    if (PyErr_Occurred() || !enter(&self->mapped))
        return NULL;
    int result = is_ready(self) ? 1 : look_if_due(self, (int64_t)(between * 1e9));
    return leave(self, result < 0 ? NULL : Py_NewRef(Py_None));
}

/* _columns(first, limit, most_bytes, out): numbers of up to `limit` messages from `first` on, column after
 * column: seq, time_ns, created_ns (64 bits), type, subtype, offsets of the payloads (32 bits,
 * one more). Returns the count of valid messages, their payload bytes, and the union of their flags. */
static PyObject *reader_columns(Reader *self, PyObject *args) {
    unsigned long long first, limit, most;
    Py_buffer out;
    if (!PyArg_ParseTuple(args, "KKKw*", &first, &limit, &most, &out))
        return NULL;
    uint64_t count = 0, bytes = 0, blocks = 0;
    uint32_t flags = 0;
    if (limit < 1ull << 56 && (uint64_t)out.len >= limit * 36 + 4 && enter(&self->mapped)) {
        int64_t *seq = out.buf, *time = seq + limit, *created = time + limit;
        int32_t *type = (int32_t *)(created + limit), *subtype = type + limit, *offset = subtype + limit;
        for (offset[0] = 0; count < limit; count++) {
            penstock_slot slot;
            penstock_load_slot(&slot, &self->ring.slots[(first + count) & self->ring.mask]);
            if (!penstock_slot_is_sane(&self->ring, &slot, first + count) || bytes + slot.length > most ||
                (blocks += slot.block) > most)
                break;
            seq[count] = (int64_t)slot.seq, time[count] = slot.time_ns, created[count] = slot.created_ns;
            type[count] = slot.type, subtype[count] = slot.subtype;
            offset[count + 1] = (int32_t)(bytes += slot.length);
            flags |= slot.flags;
        }
        self->mapped.busy = false;
    }
    PyBuffer_Release(&out);
    return PyErr_Occurred() ? NULL : Py_BuildValue("KKI", count, bytes, flags);
}

/* _payloads(first, count, out): copy payloads, or only check (`out` is empty); returns the first bad one. */
static PyObject *reader_payloads(Reader *self, PyObject *args) {
    unsigned long long first, count;
    Py_buffer out;
    if (!PyArg_ParseTuple(args, "KKw*", &first, &count, &out))
        return NULL;
    if (!enter(&self->mapped))
        return PyBuffer_Release(&out), NULL;
    uint64_t end = first + count, bad;
    Py_BEGIN_ALLOW_THREADS
    bad = penstock_copy_run(&self->ring, first, end, out.len > 0 ? out.buf : NULL, (uint64_t)out.len);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&out);
    return leave(self, bad == end ? Py_NewRef(Py_None) : PyLong_FromUnsignedLongLong(bad));
}

/* _attach(mapping, entry, holds, type or None, stream or None, the mapping as a read-only view) */
static PyObject *reader_attach(Reader *self, PyObject *args) {
    PyObject *mapping, *type, *stream, *view;
    int entry, holds;
    int64_t number = 0;
    penstock_ring ring;
    if (!PyArg_ParseTuple(args, "OipOOO", &mapping, &entry, &holds, &type, &stream, &view) ||
        !int_argument(type, "type", INT32_MIN, INT32_MAX, &number))
        return NULL;
    Mapped old = self->mapped; /* a recreated queue replaces it */
    if (!map_buffer(&self->mapped, mapping, &ring)) {
        self->mapped = old;
        return NULL;
    }
    if (old.memory.obj != NULL)
        PyBuffer_Release(&old.memory);
    self->ring = ring;
    self->entry = ring.writable && entry < (int)ring.header->readers ? entry : -1;
    self->holds = holds;
    self->name_crc = self->entry < 0 ? 0 : penstock_name_crc(&ring.readers[self->entry]);
    self->filters = type != Py_None;
    self->type = (int32_t)number;
    self->head = self->next = self->acknowledged = 0;
    self->epoch = ring.header->epoch;
    Py_XSETREF(self->view, Py_NewRef(view));
    Py_XSETREF(self->stream, Py_NewRef(stream));
    Py_RETURN_NONE;
}

/* Detach. False: a thread is reading; it will leave and close. */
static PyObject *reader_detach(Reader *self, PyObject *Py_UNUSED(ignored)) {
    self->mapped.closing = true;
    if (self->mapped.busy) {
        if (self->ring.writable) {
            self->ring.header->sleeping = 1;
            penstock_wake(&self->ring.header->sleeping, &self->ring.header->wakes);
        }
        Py_RETURN_FALSE;
    }
    if (self->mapped.memory.obj != NULL)
        PyBuffer_Release(&self->mapped.memory);
    Py_CLEAR(self->view);
    Py_CLEAR(self->stream);
    Py_RETURN_TRUE;
}

static PyObject *reader_acknowledge(Reader *self, PyObject *Py_UNUSED(ignored)) {
    if (!enter(&self->mapped))
        return NULL;
    acknowledge(self);
    return leave(self, Py_NewRef(Py_None));
}

/* The number of the oldest message, or (`head`) of the next one. */
static PyObject *reader_end(Reader *self, void *head) {
    if (self->mapped.memory.obj == NULL)
        return PyLong_FromLong(0);
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    return PyLong_FromUnsignedLongLong(head != NULL ? penstock_head(&self->ring) : penstock_tail(&self->ring));
}

static void reader_dealloc(Reader *self) {
    Py_XDECREF(reader_detach(self, NULL));
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyMethodDef reader_methods[] = {METHOD("read", reader_read, METH_FASTCALL | METH_KEYWORDS),
                                       METHOD("acknowledge", reader_acknowledge, METH_NOARGS),
                                       METHOD("_take", reader_take, METH_O), METHOD("_peek", reader_peek, METH_O),
                                       METHOD("_take_more", reader_take_more, METH_O),
                                       METHOD("_pass", reader_pass, METH_VARARGS),
                                       METHOD("_put_back", reader_put_back, METH_NOARGS),
                                       METHOD("_wait", reader_wait, METH_O),
                                       METHOD("_look_if_due", reader_look_if_due, METH_O),
                                       METHOD("_columns", reader_columns, METH_VARARGS),
                                       METHOD("_payloads", reader_payloads, METH_VARARGS),
                                       METHOD("_attach", reader_attach, METH_VARARGS),
                                       METHOD("_detach", reader_detach, METH_NOARGS),
                                       {0}};

static PyGetSetDef reader_getset[] = {{"_head", (getter)reader_end, NULL, NULL, "head"},
                                      {"_oldest", (getter)reader_end, NULL, NULL, NULL},
                                      {0}};

static PyMemberDef reader_members[] = {NUMBER("_next", Reader, next), NUMBER("_messages", Reader, messages),
                                       NUMBER("_bytes", Reader, bytes), NUMBER("_filtered", Reader, filtered),
                                       NUMBER("_numbers_of", Reader, epoch),
                                       {"_entry", T_INT, offsetof(Reader, entry), 0, NULL},
                                       {"_has_taken", T_BOOL, offsetof(Reader, has_taken), 0, NULL},
                                       {0}};

static PyTypeObject reader_type =
    TYPE("RingReader", Reader, .tp_dealloc = (destructor)reader_dealloc, .tp_methods = reader_methods,
         .tp_members = reader_members, .tp_getset = reader_getset);
