/* How do many C structs become protobuf messages at once, and messages structs?
 *
 * By a plan, which `structs.py` makes of a message's descriptor and of a struct's layout. What is
 * written is what nanopb writes of the same struct: fields in the order of their numbers, numbers
 * of an array packed, no field that is zero and has no presence.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* Types of fields, by the numbers of descriptor.proto. */
enum {
    DOUBLE = 1, FLOAT, INT64, UINT64, INT32, FIXED64, FIXED32, BOOL, STRING, GROUP, MESSAGE, BYTES,
    UINT32, ENUM, SFIXED32, SFIXED64, SINT32, SINT64, KINDS
};
enum { VARINT, I64, DELIMITED, START, END, I32 }; /* wire types */

static const uint8_t wire_of[KINDS] = {
    [DOUBLE] = I64, [FLOAT] = I32, [INT64] = VARINT, [UINT64] = VARINT, [INT32] = VARINT,
    [FIXED64] = I64, [FIXED32] = I32, [BOOL] = VARINT, [STRING] = DELIMITED,
    [MESSAGE] = DELIMITED, [BYTES] = DELIMITED, [UINT32] = VARINT, [ENUM] = VARINT,
    [SFIXED32] = I32, [SFIXED64] = I64, [SINT32] = VARINT, [SINT64] = VARINT};

/* When a field is there: it is not zero; always; always, and a message without it is none; `has_x`
 * is set; `which_x` is its number; as often as `x_count` says; as often as the array is long. */
enum { NOT_ZERO, ALWAYS, REQUIRED, HAS, WHICH, COUNTED, ALL, RULES };

enum { MOST_FIELDS = 1024, DEEPEST = 32 };

typedef struct {
    int32_t number, kind, rule;
    int32_t offset;           /* in the struct */
    int32_t width, is_signed; /* of a number in the struct */
    int32_t stride, capacity; /* of an array; a single value is an array of one */
    int32_t presence, presence_width; /* where `has_x`, `which_x` or `x_count` is; -1: nowhere */
    int32_t room;             /* bytes of a text, with the zero at its end, or of bytes */
    int32_t size_width;       /* of the size before bytes; 0: all of them */
    int32_t data;             /* where the bytes begin, after that */
    int32_t inner;            /* the type of a message; -1: none */
} Field;

typedef struct {
    int32_t first, count; /* of its fields, which ascend by number */
    int32_t size;         /* of the struct */
} Type;

enum { FINE, WRONG_SIZE, TOO_MANY, TOO_LONG, NOT_ENDED, CUT, BAD_TAG, BAD_WIRE, TOO_LARGE, MISSING,
       FEWER, TOO_DEEP, HAS_ZERO };

typedef struct {
    int32_t row, error, field;
} Failure;

typedef struct {
    PyObject_HEAD
    Type *types;
    Field *fields;
    Py_ssize_t type_count, field_count;
    size_t largest; /* a message, at most */
} Plan;

typedef struct {
    const Plan *plan;
    int depth; /* of messages inside of each other, when one is read */
    int error;
    int32_t field; /* or -1 */
} Task;

static int failed(Task *task, int error, const Field *field)
{
    task->error = error;
    task->field = field == NULL ? -1 : (int32_t)(field - task->plan->fields);
    return -1;
}

/* --- numbers of structs --------------------------------------------------------------------- */

static inline uint64_t load(const uint8_t *at, int width, int is_signed)
{
    switch (width) {
    case 1: return is_signed ? (uint64_t)(int64_t)(int8_t)*at : *at;
    case 2: {
        uint16_t value;
        memcpy(&value, at, 2);
        return is_signed ? (uint64_t)(int64_t)(int16_t)value : value;
    }
    case 4: {
        uint32_t value;
        memcpy(&value, at, 4);
        return is_signed ? (uint64_t)(int64_t)(int32_t)value : value;
    }
    default: {
        uint64_t value;
        memcpy(&value, at, 8);
        return value;
    }
    }
}

/* Store a number; 0: it does not fit. Signed ones come extended to 64 bits. */
static inline int store(uint8_t *at, int width, int is_signed, uint64_t value)
{
    memcpy(at, &value, (size_t)width); /* the first bytes are the low ones */
    return load(at, width, is_signed) == value;
}

/* --- structs to messages -------------------------------------------------------------------- */

/* Messages are written from their end: a length is known when what it counts is there. */

static inline uint8_t *put_varint(uint8_t *end, uint64_t value)
{
    uint8_t bytes[10];
    int count = 0;
    do {
        bytes[count++] = (uint8_t)(value & 0x7f) | (value > 0x7f ? 0x80 : 0);
        value >>= 7;
    } while (value);
    end -= count;
    memcpy(end, bytes, (size_t)count);
    return end;
}

static inline uint8_t *put_number(uint8_t *end, const Field *field, const uint8_t *at)
{
    uint64_t value = load(at, field->width, field->is_signed);
    switch (field->kind) {
    case SINT32: case SINT64:
        return put_varint(end, (value << 1) ^ (uint64_t)((int64_t)value >> 63));
    case BOOL: return put_varint(end, value != 0);
    case DOUBLE: case FIXED64: case SFIXED64: memcpy(end - 8, &value, 8); return end - 8;
    case FLOAT: case FIXED32: case SFIXED32: memcpy(end - 4, &value, 4); return end - 4;
    default: return put_varint(end, value);
    }
}

static uint8_t *put_message(Task *task, const Type *type, const uint8_t *base, uint8_t *end);

/* Write one value without its tag; NULL: it is none. */
static uint8_t *put_value(Task *task, const Field *field, const uint8_t *at, uint8_t *end)
{
    if (field->kind == MESSAGE) {
        uint8_t *start = put_message(task, task->plan->types + field->inner, at, end);
        return start == NULL ? NULL : put_varint(start, (uint64_t)(end - start));
    }
    if (field->kind == STRING) {
        const uint8_t *zero = memchr(at, 0, (size_t)field->room);
        if (zero == NULL)
            return (void)failed(task, NOT_ENDED, field), NULL;
        end -= zero - at;
        memcpy(end, at, (size_t)(zero - at));
        return put_varint(end, (uint64_t)(zero - at));
    }
    if (field->kind == BYTES) {
        uint64_t size = (uint64_t)field->room;
        if (field->size_width)
            size = load(at, field->size_width, 0);
        if (size > (uint64_t)field->room)
            return (void)failed(task, TOO_LONG, field), NULL;
        end -= size;
        memcpy(end, at + field->data, size);
        return put_varint(end, size);
    }
    return put_number(end, field, at);
}

static int is_zero(const Field *field, const uint8_t *at)
{
    if (field->kind == STRING)
        return *at == 0;
    if (field->kind == BYTES)
        return field->size_width && load(at, field->size_width, 0) == 0;
    return load(at, field->width, 0) == 0;
}

static uint8_t *put_array(Task *task, const Field *field, const uint8_t *base, uint8_t *end)
{
    uint64_t count = (uint64_t)field->capacity;
    if (field->rule == COUNTED)
        count = load(base + field->presence, field->presence_width, 0);
    if (count > (uint64_t)field->capacity)
        return (void)failed(task, TOO_MANY, field), NULL;
    const uint8_t *first = base + field->offset, *at = first + count * (uint64_t)field->stride;
    uint8_t *last = end;
    if (count == 0)
        return end;
    int is_packed = wire_of[field->kind] != DELIMITED;
    while (at > first) {
        at -= field->stride;
        end = is_packed ? put_number(end, field, at) : put_value(task, field, at, end);
        if (end != NULL && !is_packed)
            end = put_varint(end, (uint64_t)field->number << 3 | DELIMITED);
        if (end == NULL)
            return NULL;
    }
    if (is_packed) {
        end = put_varint(end, (uint64_t)(last - end));
        end = put_varint(end, (uint64_t)field->number << 3 | DELIMITED);
    }
    return end;
}

static uint8_t *put_message(Task *task, const Type *type, const uint8_t *base, uint8_t *end)
{
    const Field *first = task->plan->fields + type->first;
    for (const Field *field = first + type->count; field-- > first;) {
        const uint8_t *at = base + field->offset, *presence = base + field->presence;
        switch (field->rule) {
        case COUNTED: case ALL:
            if ((end = put_array(task, field, base, end)) == NULL)
                return NULL;
            continue;
        case HAS:
            if (load(presence, field->presence_width, 0) == 0)
                continue;
            break;
        case WHICH:
            if (load(presence, field->presence_width, 0) != (uint64_t)field->number)
                continue;
            break;
        case NOT_ZERO:
            if (field->kind != MESSAGE && is_zero(field, at))
                continue;
            break;
        }
        uint8_t *start = put_value(task, field, at, end);
        if (start == NULL)
            return NULL;
        if (field->rule == NOT_ZERO && field->kind == MESSAGE && end - start == 1)
            continue; /* its length, which is 0 */
        end = put_varint(start, (uint64_t)field->number << 3 | wire_of[field->kind]);
    }
    return end;
}

/* --- messages to structs -------------------------------------------------------------------- */

static const uint8_t *get_varint(const uint8_t *at, const uint8_t *end, uint64_t *found)
{
    uint64_t value = 0;
    for (int shift = 0; shift < 70 && at < end; shift += 7, at++) {
        value |= (uint64_t)(*at & 0x7f) << (shift > 63 ? 63 : shift);
        if (*at < 0x80) {
            *found = value;
            return at + 1;
        }
    }
    return NULL;
}

/* Read a length and what it counts; NULL: it ends before. */
static const uint8_t *get_length(const uint8_t *at, const uint8_t *end, uint64_t *size)
{
    at = get_varint(at, end, size);
    return at == NULL || *size > (uint64_t)(end - at) ? NULL : at;
}

static inline int is_tag(uint64_t tag) { return tag >> 3 != 0 && tag >> 32 == 0; }

/* Step over the value of a tag that nobody knows. */
static const uint8_t *skip(Task *task, const uint8_t *at, const uint8_t *end, uint64_t tag,
                           int depth)
{
    uint64_t value;
    switch (tag & 7) {
    case VARINT: at = get_varint(at, end, &value); break;
    case I64: at = end - at < 8 ? NULL : at + 8; break;
    case I32: at = end - at < 4 ? NULL : at + 4; break;
    case DELIMITED:
        at = get_length(at, end, &value);
        at = at == NULL ? NULL : at + value;
        break;
    case START:
        if (depth == 0)
            return (void)failed(task, TOO_DEEP, NULL), NULL;
        for (;;) {
            at = get_varint(at, end, &value);
            if (at == NULL || value == ((tag & ~(uint64_t)7) | END))
                break; /* the end of the group that began */
            if (!is_tag(value))
                return (void)failed(task, BAD_TAG, NULL), NULL;
            at = skip(task, at, end, value, depth - 1);
            if (at == NULL)
                return NULL;
        }
        break;
    default: return (void)failed(task, BAD_TAG, NULL), NULL;
    }
    return at != NULL ? at : ((void)failed(task, CUT, NULL), NULL);
}

/* Read a number into a struct. */
static const uint8_t *get_number(Task *task, const Field *field, uint8_t *to, const uint8_t *at,
                                 const uint8_t *end)
{
    uint64_t value = 0;
    int wire = wire_of[field->kind], size = wire == I64 ? 8 : 4;
    if (wire == VARINT) {
        at = get_varint(at, end, &value);
    } else {
        if (end - at < size)
            at = NULL;
        else
            memcpy(&value, at, (size_t)size), at += size;
    }
    if (at == NULL)
        return (void)failed(task, CUT, field), NULL;
    switch (field->kind) {
    case INT32: case ENUM: case SFIXED32: value = (uint64_t)(int64_t)(int32_t)value; break;
    case UINT32: value = (uint32_t)value; break;
    case BOOL: value = value != 0; break;
    case SINT32: value = (uint32_t)value; /* fallthrough */
    case SINT64: value = (value >> 1) ^ (0 - (value & 1)); break;
    }
    int is_signed = field->is_signed;
    if (field->kind == ENUM && !is_signed && field->width == 4)
        value = (uint32_t)value; /* an enum of C without negative numbers */
    if (!store(to, field->width, is_signed, value))
        return (void)failed(task, TOO_LARGE, field), NULL;
    return at;
}

static int get_message(Task *task, const Type *type, uint8_t *base, const uint8_t *at,
                       const uint8_t *end);

/* Read one value of `size` bytes, or a number up to `end`, into a struct. */
static const uint8_t *get_value(Task *task, const Field *field, uint8_t *to, const uint8_t *at,
                                const uint8_t *end)
{
    uint64_t size;
    if (wire_of[field->kind] != DELIMITED)
        return get_number(task, field, to, at, end);
    if ((at = get_length(at, end, &size)) == NULL)
        return (void)failed(task, CUT, field), NULL;
    if (field->kind == MESSAGE) {
        if (get_message(task, task->plan->types + field->inner, to, at, at + size) < 0)
            return NULL;
        return at + size;
    }
    uint64_t room = (uint64_t)field->room - (field->kind == STRING);
    int is_exact = field->kind == BYTES && field->size_width == 0;
    if (size > room || (is_exact && size && size != room)) /* no bytes are all zeros, as in nanopb */
        return (void)failed(task, TOO_LONG, field), NULL;
    if (field->kind == STRING && memchr(at, 0, size) != NULL) /* C would see its end there */
        return (void)failed(task, HAS_ZERO, field), NULL;
    if (field->kind == BYTES && field->size_width)
        store(to, field->size_width, 0, size);
    memset(to + field->data, 0, (size_t)field->room);
    memcpy(to + field->data, at, size);
    return at + size;
}

/* Read one more element, or all of a packed array. */
static const uint8_t *get_elements(Task *task, const Field *field, uint8_t *base, uint32_t *seen,
                                   const uint8_t *at, const uint8_t *end, int is_packed)
{
    const uint8_t *last = end;
    if (is_packed) {
        uint64_t size;
        if ((at = get_length(at, end, &size)) == NULL)
            return (void)failed(task, CUT, field), NULL;
        last = at + size;
    }
    do {
        if (is_packed && at == last)
            break; /* an empty one */
        if (*seen == (uint32_t)field->capacity)
            return (void)failed(task, TOO_MANY, field), NULL;
        uint8_t *to = base + field->offset + (size_t)*seen * (size_t)field->stride;
        if ((at = get_value(task, field, to, at, last)) == NULL)
            return NULL;
        ++*seen;
    } while (is_packed && at < last);
    if (field->rule == COUNTED)
        store(base + field->presence, field->presence_width, 0, *seen);
    return at;
}

static int get_message(Task *task, const Type *type, uint8_t *base, const uint8_t *at,
                       const uint8_t *end)
{
    const Field *first = task->plan->fields + type->first, *last = first + type->count;
    const Field *field = first;
    uint32_t seen[MOST_FIELDS];
    if (task->depth++ == DEEPEST)
        return failed(task, TOO_DEEP, NULL);
    memset(seen, 0, (size_t)type->count * sizeof *seen);
    for (const Field *each = first; each < last; each++)
        if (each->rule == COUNTED) /* a message that comes again is merged with the first */
            seen[each - first] = (uint32_t)load(base + each->presence, each->presence_width, 0);
    while (at < end) {
        uint64_t tag;
        if ((at = get_varint(at, end, &tag)) == NULL)
            return failed(task, CUT, NULL);
        if (!is_tag(tag))
            return failed(task, BAD_TAG, NULL);
        int wire = tag & 7;
        int64_t number = (int64_t)(tag >> 3);
        if (field == last || field->number != number)
            for (field = first; field < last && field->number != number; field++)
                ;
        if (field == last) {
            if ((at = skip(task, at, end, tag, DEEPEST)) == NULL)
                return -1;
            continue;
        }
        int is_array = field->rule == COUNTED || field->rule == ALL;
        int is_packed = is_array && wire == DELIMITED && wire_of[field->kind] != DELIMITED;
        if (wire != wire_of[field->kind] && !is_packed)
            return failed(task, BAD_WIRE, field);
        uint8_t *to = base + field->offset;
        if (is_array) {
            at = get_elements(task, field, base, &seen[field - first], at, end, is_packed);
        } else {
            uint8_t *presence = base + field->presence;
            if (field->rule == WHICH &&
                load(presence, field->presence_width, 0) != (uint64_t)field->number)
                memset(to, 0, (size_t)field->stride); /* its place was another's */
            if (field->rule == HAS)
                store(presence, field->presence_width, 0, 1);
            if (field->rule == WHICH)
                store(presence, field->presence_width, 0, (uint64_t)field->number);
            at = get_value(task, field, to, at, end);
            seen[field - first] = 1;
        }
        if (at == NULL)
            return -1;
    }
    for (const Field *each = first; each < last; each++) {
        uint32_t count = seen[each - first];
        if (each->rule == REQUIRED && count == 0)
            return failed(task, MISSING, each);
        if (each->rule == ALL && count && count != (uint32_t)each->capacity) /* as above */
            return failed(task, FEWER, each);
    }
    task->depth--;
    return 0;
}

/* --- what Python sees ----------------------------------------------------------------------- */

typedef struct {
    Failure *items;
    Py_ssize_t count, room;
} Failures;

static int add_failure(Failures *all, const Task *task, Py_ssize_t row)
{
    if (all->count == all->room) {
        Py_ssize_t room = all->room ? 2 * all->room : 16;
        Failure *items = realloc(all->items, (size_t)room * sizeof *items);
        if (items == NULL)
            return -1;
        all->items = items;
        all->room = room;
    }
    all->items[all->count++] = (Failure){(int32_t)row, task->error, task->field};
    return 0;
}

static PyObject *failure_list(const Failures *all)
{
    PyObject *list = PyList_New(all->count);
    for (Py_ssize_t i = 0; list != NULL && i < all->count; i++) {
        const Failure *each = &all->items[i];
        PyObject *item = Py_BuildValue("(iii)", each->row, each->error, each->field);
        if (item == NULL)
            Py_CLEAR(list);
        else
            PyList_SET_ITEM(list, i, item);
    }
    return list;
}

/* The payloads of a BinaryArray. */
typedef struct {
    Py_buffer offsets, data;
    const int32_t *places;
    Py_ssize_t count;
} Payloads;

static int get_payloads(Payloads *payloads, PyObject *args)
{
    Py_ssize_t first;
    if (!PyArg_ParseTuple(args, "y*y*nn", &payloads->offsets, &payloads->data, &first,
                          &payloads->count))
        return -1;
    Py_ssize_t known = payloads->offsets.len / (Py_ssize_t)sizeof(int32_t);
    int fits = first >= 0 && payloads->count >= 0 && first < known && payloads->count < known - first;
    payloads->places = (const int32_t *)payloads->offsets.buf + first;
    for (Py_ssize_t i = 0; fits && i < payloads->count; i++)
        fits = payloads->places[i] >= 0 && payloads->places[i] <= payloads->places[i + 1];
    if (fits && payloads->places[payloads->count] <= payloads->data.len)
        return 0;
    PyBuffer_Release(&payloads->offsets);
    PyBuffer_Release(&payloads->data);
    PyErr_SetString(PyExc_ValueError, "offsets that do not fit the data");
    return -1;
}

static void drop_payloads(Payloads *payloads)
{
    PyBuffer_Release(&payloads->offsets);
    PyBuffer_Release(&payloads->data);
}

static PyObject *serialise(Plan *self, PyObject *args)
{
    Payloads in;
    if (get_payloads(&in, args) < 0)
        return NULL;
    Failures failures = {0};
    size_t used = 0, room = 0;
    uint8_t *out = NULL, *scratch = malloc(self->largest);
    PyObject *offsets = PyBytes_FromStringAndSize(NULL, (in.count + 1) * (Py_ssize_t)sizeof(int32_t));
    int is_out = scratch == NULL || offsets == NULL, is_over = 0;
    if (!is_out) {
        int32_t *ends = (int32_t *)PyBytes_AS_STRING(offsets);
        Py_BEGIN_ALLOW_THREADS
        ends[0] = 0;
        for (Py_ssize_t row = 0; row < in.count && !is_out && !is_over; row++) {
            Task task = {.plan = self, .field = -1};
            const uint8_t *base = (const uint8_t *)in.data.buf + in.places[row];
            uint8_t *end = scratch + self->largest, *start = NULL;
            if (in.places[row + 1] - in.places[row] != self->types[0].size)
                failed(&task, WRONG_SIZE, NULL);
            else
                start = put_message(&task, self->types, base, end);
            size_t size = start == NULL ? 0 : (size_t)(end - start);
            if (start == NULL)
                is_out = add_failure(&failures, &task, row) < 0;
            if (room - used < size) {
                size_t more = 2 * room + size + 4096;
                uint8_t *larger = realloc(out, more);
                is_out |= larger == NULL;
                if (larger != NULL)
                    out = larger, room = more;
            }
            if (!is_out && size)
                memcpy(out + used, start, size);
            used += size;
            is_over = used > INT32_MAX;
            ends[row + 1] = (int32_t)used;
        }
        Py_END_ALLOW_THREADS
    }
    free(scratch);
    drop_payloads(&in);
    PyObject *list = is_out || is_over ? NULL : failure_list(&failures), *result = NULL;
    if (list != NULL)
        result = Py_BuildValue("(Oy#N)", offsets, out == NULL ? "" : (char *)out, (Py_ssize_t)used, list);
    else if (is_over)
        PyErr_SetString(PyExc_OverflowError, "more than 2^31 - 1 bytes");
    else if (!PyErr_Occurred())
        PyErr_NoMemory();
    Py_XDECREF(offsets);
    free(failures.items);
    free(out);
    return result;
}

static PyObject *deserialise(Plan *self, PyObject *args)
{
    Payloads in;
    if (get_payloads(&in, args) < 0)
        return NULL;
    Failures failures = {0};
    int is_out = 0;
    Py_ssize_t size = self->types[0].size;
    if (in.count > PY_SSIZE_T_MAX / size) {
        drop_payloads(&in);
        return PyErr_NoMemory();
    }
    PyObject *rows = PyByteArray_FromStringAndSize(NULL, in.count * size);
    if (rows != NULL) {
        uint8_t *out = (uint8_t *)PyByteArray_AS_STRING(rows);
        Py_BEGIN_ALLOW_THREADS
        memset(out, 0, (size_t)(in.count * size));
        for (Py_ssize_t row = 0; row < in.count && !is_out; row++) {
            Task task = {.plan = self, .field = -1};
            const uint8_t *data = in.data.buf;
            uint8_t *base = out + row * size;
            if (get_message(&task, self->types, base, data + in.places[row],
                            data + in.places[row + 1]) < 0) {
                memset(base, 0, (size_t)size);
                is_out = add_failure(&failures, &task, row) < 0;
            }
        }
        Py_END_ALLOW_THREADS
    }
    drop_payloads(&in);
    PyObject *list = rows == NULL || is_out ? NULL : failure_list(&failures), *result = NULL;
    if (list != NULL)
        result = Py_BuildValue("(ON)", rows, list);
    else if (!PyErr_Occurred())
        PyErr_NoMemory();
    Py_XDECREF(rows);
    free(failures.items);
    return result;
}

static int is_inside(int64_t at, int64_t size, int64_t whole)
{
    return at >= 0 && size >= 0 && at + size <= whole;
}

static int is_width(int32_t width) { return width == 1 || width == 2 || width == 4 || width == 8; }

/* Whether a field is inside of its struct. */
static int fits(const Plan *self, const Field *field, const Type *type)
{
    if (field->number < 1 || field->kind < 1 || field->kind >= KINDS || field->kind == GROUP ||
        field->rule < 0 || field->rule >= RULES || field->stride < 1 || field->capacity < 1 ||
        !is_inside(field->offset, (int64_t)field->stride * field->capacity, type->size))
        return 0;
    int has_presence = field->rule == HAS || field->rule == WHICH || field->rule == COUNTED;
    if (has_presence && (!is_width(field->presence_width) ||
                         !is_inside(field->presence, field->presence_width, type->size)))
        return 0;
    if (!has_presence && field->presence != 0)
        return 0;
    switch (field->kind) {
    case MESSAGE:
        /* Those inside come later: a struct has no way to have itself inside. */
        return field->inner > type - self->types && field->inner < self->type_count &&
               self->types[field->inner].size <= field->stride;
    case STRING: return field->room >= 1 && field->data == 0 && field->room <= field->stride;
    case BYTES:
        return (field->size_width == 0 || is_width(field->size_width)) &&
               field->data >= field->size_width && field->room >= 0 &&
               is_inside(field->data, field->room, field->stride);
    case DOUBLE: return field->width == 8 && field->stride >= 8;
    case FLOAT: return field->width == 4 && field->stride >= 4;
    default: return is_width(field->width) && field->width <= field->stride;
    }
}

static PyObject *make(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    Py_buffer types = {0}, fields = {0};
    Py_ssize_t largest;
    if (kwargs != NULL || !PyArg_ParseTuple(args, "y*y*n", &types, &fields, &largest))
        return kwargs != NULL ? PyErr_Format(PyExc_TypeError, "Plan(types, fields, largest)") : NULL;
    Plan *self = (Plan *)type->tp_alloc(type, 0);
    if (self != NULL) {
        self->type_count = types.len / (Py_ssize_t)sizeof(Type);
        self->field_count = fields.len / (Py_ssize_t)sizeof(Field);
        self->largest = (size_t)largest;
        self->types = PyMem_Malloc((size_t)types.len + 1);
        self->fields = PyMem_Malloc((size_t)fields.len + 1);
        int is_fine = self->types != NULL && self->fields != NULL && self->type_count > 0 && largest > 0;
        if (is_fine) {
            memcpy(self->types, types.buf, (size_t)types.len);
            memcpy(self->fields, fields.buf, (size_t)fields.len);
        }
        for (Py_ssize_t i = 0; is_fine && i < self->type_count; i++) {
            const Type *each = &self->types[i];
            is_fine = each->size > 0 && each->count <= MOST_FIELDS &&
                      is_inside(each->first, each->count, self->field_count);
            for (int32_t j = 0; is_fine && j < each->count; j++)
                is_fine = fits(self, &self->fields[each->first + j], each);
        }
        if (!is_fine) {
            Py_CLEAR(self);
            PyErr_SetString(PyExc_ValueError, "tables that do not fit together");
        }
    }
    PyBuffer_Release(&types);
    PyBuffer_Release(&fields);
    return (PyObject *)self;
}

static void dispose(Plan *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyMem_Free(self->types);
    PyMem_Free(self->fields);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMethodDef plan_methods[] = {
    {"serialise", (PyCFunction)serialise, METH_VARARGS, "serialise(offsets, data, first, count)"},
    {"deserialise", (PyCFunction)deserialise, METH_VARARGS, "deserialise(offsets, data, first, count)"},
    {NULL, NULL, 0, NULL}};

static PyType_Slot plan_slots[] = {
    {Py_tp_new, make}, {Py_tp_dealloc, dispose}, {Py_tp_methods, plan_methods}, {0, NULL}};

static PyType_Spec plan_spec = {.name = "penstock.protocols.jrtc._structs.Plan",
                                .basicsize = sizeof(Plan),
                                .flags = Py_TPFLAGS_DEFAULT,
                                .slots = plan_slots};

static int execute(PyObject *module)
{
    PyObject *type = PyType_FromSpec(&plan_spec);
    int result = type == NULL ? -1 : PyModule_AddObjectRef(module, "Plan", type);
    Py_XDECREF(type);
    return result;
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, execute}, {0, NULL}};

static struct PyModuleDef module_def = {PyModuleDef_HEAD_INIT, .m_name = "_structs",
                                        .m_slots = module_slots};

PyMODINIT_FUNC PyInit__structs(void) { return PyModuleDef_Init(&module_def); }
