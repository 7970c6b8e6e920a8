/* How do protobuf messages become Arrow columns?
 *
 * Each payload is parsed as a whole, then appended to the columns: so nothing of one that fails is
 * ever in a column. Which fields and columns there are is in a plan: tables of 32-bit numbers that
 * Python makes of a descriptor, and that are checked once. No Python object is made for a message,
 * and other threads run meanwhile. The columns leave by Arrow's C data interface, without a copy.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "_messages.h"

/* --- Arrow's C data interface, as its specification has it ---------------------------------- */

struct ArrowArray {
    int64_t length;
    int64_t null_count;
    int64_t offset;
    int64_t n_buffers;
    int64_t n_children;
    const void **buffers;
    struct ArrowArray **children;
    struct ArrowArray *dictionary;
    void (*release)(struct ArrowArray *);
    void *private_data;
};

/* --- columns -------------------------------------------------------------------------------- */

typedef struct {
    uint8_t *data;
    size_t used, capacity;
} Buffer;

typedef struct Column {
    const ColumnPlan *plan;
    struct Column *children;
    size_t length, nulls;
    Buffer validity, offsets, data;
} Column;

static uint8_t *grow(Buffer *buffer, size_t size)
{
    if (buffer->capacity - buffer->used < size || buffer->data == NULL) {
        size_t capacity = buffer->capacity * 2 + 64;
        if (capacity < buffer->used + size)
            capacity = buffer->used + size;
        uint8_t *data = realloc(buffer->data, capacity);
        if (data == NULL)
            return NULL;
        buffer->data = data;
        buffer->capacity = capacity;
    }
    uint8_t *room = buffer->data + buffer->used;
    buffer->used += size;
    return room;
}

static inline int put_bytes(Buffer *buffer, const void *bytes, size_t size)
{
    uint8_t *room = grow(buffer, size);
    if (room == NULL)
        return NO_MEMORY;
    if (size)
        memcpy(room, bytes, size);
    return FINE;
}

static int put_bit(Buffer *buffer, size_t index, int bit)
{
    if (index / 8 == buffer->used) {
        uint8_t *room = grow(buffer, 1);
        if (room == NULL)
            return NO_MEMORY;
        *room = 0;
    }
    buffer->data[index / 8] |= (uint8_t)(bit << index % 8);
    return FINE;
}

static int put_offset(Buffer *buffer, size_t offset)
{
    if (offset > INT32_MAX)
        return TOO_MANY;
    int32_t narrow = (int32_t)offset;
    return put_bytes(buffer, &narrow, sizeof narrow);
}

/* Count one more value. The bits of which is null are only made when one is. */
static int put_valid(Column *column, int is_valid)
{
    int error = FINE;
    if (!is_valid && column->nulls++ == 0)
        for (size_t i = 0; i < column->length && !error; i++)
            error = put_bit(&column->validity, i, 1);
    if (column->nulls && !error)
        error = put_bit(&column->validity, column->length, is_valid);
    column->length++;
    return error;
}

static int put_text(Column *column, const void *text, size_t size)
{
    int error = put_bytes(&column->data, text, size);
    return error ? error : put_offset(&column->offsets, column->data.used);
}

static int put_name(const Plan *plan, Column *column, int32_t number)
{
    char digits[16];
    const EnumValue *value = find_value(plan, column->plan->inner, number);
    if (value != NULL)
        return put_text(column, (const char *)plan->table[NAMES] + value->start,
                        (size_t)value->size);
    int size = snprintf(digits, sizeof digits, "%d", (int)number);
    return put_text(column, digits, (size_t)size);
}

static int put_null(Column *column)
{
    static const uint8_t nothing[16];
    int error = FINE;
    switch (column->plan->kind) {
    case MESSAGE:
        for (int32_t i = 0; i < column->plan->children && !error; i++)
            error = put_null(column->children + i);
        break;
    case LIST:
        error = put_offset(&column->offsets, column->children->length);
        break;
    case STRING: case BYTES: case ENUM:
        error = put_offset(&column->offsets, column->data.used);
        break;
    case BOOL:
        error = put_bit(&column->data, column->length, 0);
        break;
    case UINT64: case FIXED64:
        error = put_bytes(&column->data, nothing, 16);
        break;
    case UINT32: case FIXED32:
        error = put_bytes(&column->data, nothing, 8);
        break;
    default:
        error = put_bytes(&column->data, nothing, width_of[column->plan->kind]);
    }
    return error ? error : put_valid(column, 0);
}

static int put(const Plan *plan, Column *column, const Slot *slot);

static int put_list(const Plan *plan, Column *column, const Array *array)
{
    Column *child = column->children;
    int32_t kind = child->plan->kind;
    int error = FINE;
    size_t count = array == NULL ? 0 : array->count;
    switch (kind) {
    case DOUBLE: case FLOAT: case INT64: case INT32: case SFIXED32: case SFIXED64: case SINT32:
    case SINT64: /* as they are */
        error = count ? put_bytes(&child->data, array->data, count * width_of[kind]) : FINE;
        child->length += count;
        break;
    default:
        for (size_t i = 0; i < count && !error; i++) {
            Slot slot = element(array, kind, i);
            error = put(plan, child, &slot);
        }
    }
    return error ? error : put_offset(&column->offsets, child->length);
}

static int put(const Plan *plan, Column *column, const Slot *slot)
{
    if (!slot->present && column->plan->flags & NULLABLE)
        return put_null(column);
    int error = FINE;
    uint64_t wide[2] = {slot->number, 0}; /* little-endian, as all of this is */
    switch (column->plan->kind) {
    case MESSAGE:
        for (int32_t i = 0; i < column->plan->children && !error; i++) {
            Column *child = column->children + i;
            error = put(plan, child, slot->message + child->plan->slot);
        }
        break;
    case LIST:
        error = put_list(plan, column, slot->array);
        break;
    case STRING: case BYTES:
        error = put_text(column, slot->text, slot->size);
        break;
    case ENUM:
        error = put_name(plan, column, (int32_t)slot->number);
        break;
    case BOOL:
        error = put_bit(&column->data, column->length, slot->number != 0);
        break;
    case UINT64: case FIXED64:
        error = put_bytes(&column->data, wide, 16);
        break;
    case UINT32: case FIXED32: /* extended as if it were signed */
        wide[0] &= UINT32_MAX;
        error = put_bytes(&column->data, wide, 8);
        break;
    case DOUBLE: case INT64: case SFIXED64: case SINT64:
        error = put_bytes(&column->data, wide, 8);
        break;
    default:
        error = put_bytes(&column->data, wide, 4);
    }
    return error ? error : put_valid(column, 1);
}

/* Tell whether all text that will be appended is UTF-8, where parsing did not look at it. */
static int is_text(const Column *column, const Slot *slot)
{
    int is_good = 1;
    if (!(column->plan->flags & UNCHECKED) || !slot->present)
        return 1;
    if (column->plan->kind == STRING)
        return is_utf8(slot->text, slot->size);
    if (column->plan->kind == LIST) {
        for (size_t i = 0; i < slot->array->count && is_good; i++) {
            Slot each = element(slot->array, column->children->plan->kind, i);
            is_good = is_text(column->children, &each);
        }
        return is_good;
    }
    for (int32_t i = 0; i < column->plan->children && is_good; i++) {
        const Column *child = column->children + i;
        is_good = is_text(child, slot->message + child->plan->slot);
    }
    return is_good;
}

/* Make the columns of a plan, from `*at` on. */
static int make(const Plan *plan, Column *column, Py_ssize_t *at)
{
    column->plan = (const ColumnPlan *)plan->table[COLUMNS] + (*at)++;
    size_t count = (size_t)column->plan->children;
    if (count && (column->children = calloc(count, sizeof(Column))) == NULL)
        return NO_MEMORY;
    int error = FINE, kind = column->plan->kind;
    if (kind == LIST || kind == STRING || kind == BYTES || kind == ENUM)
        error = put_offset(&column->offsets, 0);
    for (size_t i = 0; i < count && !error; i++)
        error = make(plan, column->children + i, at);
    return error;
}

static void unmake(Column *column)
{
    for (int32_t i = 0; column->children != NULL && i < column->plan->children; i++)
        unmake(column->children + i);
    free(column->children);
    free(column->validity.data);
    free(column->offsets.data);
    free(column->data.data);
}

/* --- handing over --------------------------------------------------------------------------- */

typedef struct {
    const void *buffers[3];
    struct ArrowArray **children;
    struct ArrowArray inner[];
} Exported;

static void release(struct ArrowArray *array)
{
    Exported *exported = array->private_data;
    for (int64_t i = 0; i < array->n_children; i++)
        if (exported->inner[i].release != NULL)
            exported->inner[i].release(exported->inner + i);
    for (int i = 0; i < 3; i++)
        free((void *)(uintptr_t)exported->buffers[i]);
    free(exported->children);
    free(exported);
    array->release = NULL;
}

/* Move a column's buffers into an array. What was not moved is still the column's. */
static int export(Column *column, struct ArrowArray *array)
{
    size_t count = (size_t)column->plan->children;
    Exported *exported = calloc(1, sizeof(Exported) + count * sizeof(struct ArrowArray));
    if (exported == NULL)
        return NO_MEMORY;
    *array = (struct ArrowArray){.length = (int64_t)column->length,
                                 .null_count = (int64_t)column->nulls,
                                 .n_children = (int64_t)count,
                                 .buffers = exported->buffers,
                                 .release = release,
                                 .private_data = exported};
    int kind = column->plan->kind;
    Buffer *buffers[3] = {&column->validity};
    array->n_buffers = 1;
    if (kind == LIST || kind == STRING || kind == BYTES || kind == ENUM)
        buffers[array->n_buffers++] = &column->offsets;
    if (kind != LIST && kind != MESSAGE)
        buffers[array->n_buffers++] = &column->data;
    for (int64_t i = 0; i < array->n_buffers; i++) {
        if (i && grow(buffers[i], 0) == NULL) /* only the first may be left out */
            return NO_MEMORY;
        exported->buffers[i] = buffers[i]->data;
        *buffers[i] = (Buffer){0};
    }
    if (count && (exported->children = calloc(count, sizeof *exported->children)) == NULL)
        return NO_MEMORY;
    array->children = exported->children;
    for (size_t i = 0; i < count; i++) {
        exported->children[i] = exported->inner + i;
        if (export(column->children + i, exported->inner + i))
            return NO_MEMORY;
    }
    return FINE;
}

static void free_capsule(PyObject *capsule)
{
    struct ArrowArray *array = PyCapsule_GetPointer(capsule, "arrow_array");
    if (array->release != NULL)
        array->release(array);
    free(array);
}

static PyObject *new_capsule(Column *column)
{
    struct ArrowArray *array = calloc(1, sizeof *array);
    if (array == NULL)
        return PyErr_NoMemory();
    int error = export(column, array);
    PyObject *capsule = error ? PyErr_NoMemory()
                              : PyCapsule_New(array, "arrow_array", free_capsule);
    if (capsule == NULL) {
        if (array->release != NULL)
            array->release(array);
        free(array);
    }
    return capsule;
}

/* --- a column of payloads ------------------------------------------------------------------- */

typedef struct {
    int64_t row;
    int32_t error, field;
} Failure;

typedef struct {
    const int64_t *offsets;
    const uint8_t *data;
    Py_ssize_t count, max_size;
    Column columns;
    Buffer failures;
} Work;

/* Parse all payloads; return what makes an end of it, if there is something. */
static int work_through(const Plan *plan, Work *work)
{
    Parser parser = {.plan = plan};
    int fatal = FINE;
    for (Py_ssize_t row = 0; row < work->count && !fatal; row++) {
        const uint8_t *at = work->data + work->offsets[row];
        const uint8_t *end = work->data + work->offsets[row + 1];
        empty(&parser.arena);
        parser.depth = DEEPEST;
        parser.error = FINE;
        parser.where = NULL;
        Slot top = {.present = 1};
        if (end - at > work->max_size)
            fail(&parser, TOO_LARGE, NULL);
        else if ((top.message = new_message(&parser, 0)) != NULL &&
                 parse(&parser, at, end, 0, top.message, 0) != NULL &&
                 finish(&parser, 0, top.message) == 0 && plan->unchecked &&
                 !is_text(&work->columns, &top))
            fail(&parser, BAD_TEXT, NULL);
        if (parser.error == FINE) {
            fatal = put(plan, &work->columns, &top);
        } else if (parser.error == NO_MEMORY) {
            fatal = NO_MEMORY;
        } else {
            const Field *fields = plan->table[FIELDS];
            int32_t field = parser.where == NULL ? -1 : (int32_t)(parser.where - fields);
            Failure failure = {row, parser.error, field};
            fatal = put_bytes(&work->failures, &failure, sizeof failure);
        }
    }
    drop(&parser.arena);
    return fatal;
}

static PyObject *list_of(const Buffer *failures)
{
    Py_ssize_t count = (Py_ssize_t)(failures->used / sizeof(Failure));
    PyObject *list = PyList_New(count);
    for (Py_ssize_t i = 0; list != NULL && i < count; i++) {
        const Failure *each = (const Failure *)(void *)failures->data + i;
        PyObject *item = Py_BuildValue("(Lii)", (long long)each->row, each->error, each->field);
        if (item == NULL)
            Py_CLEAR(list);
        else
            PyList_SET_ITEM(list, i, item);
    }
    return list;
}

static int check_payloads(const Py_buffer *offsets, Py_ssize_t first, Py_ssize_t data,
                          const Work *work)
{
    Py_ssize_t held = offsets->len / (Py_ssize_t)sizeof(int64_t);
    int is_good = first >= 0 && work->count >= 0 && first <= held - 1 &&
                  work->count <= held - 1 - first && work->offsets[0] >= 0;
    for (Py_ssize_t i = 0; is_good && i < work->count; i++)
        is_good = work->offsets[i] <= work->offsets[i + 1];
    if (!is_good || work->offsets[work->count] > data) {
        PyErr_SetString(PyExc_ValueError, "the offsets do not ascend inside of the data");
        return -1;
    }
    return 0;
}

typedef struct {
    PyObject_HEAD
    Plan plan;
} PyPlan;

static PyObject *Plan_parse(PyPlan *self, PyObject *args)
{
    const Plan *plan = &self->plan;
    Py_buffer offsets = {0}, data = {0};
    Py_ssize_t first;
    Work work = {0};
    if (!PyArg_ParseTuple(args, "y*y*nnn:parse", &offsets, &data, &first, &work.count,
                          &work.max_size))
        return NULL;
    PyObject *capsule = NULL, *failures = NULL;
    Py_ssize_t at = 0;
    int error = FINE;
    work.offsets = (const int64_t *)offsets.buf + (first > 0 ? first : 0);
    work.data = data.buf;
    if (check_payloads(&offsets, first, data.len, &work) == 0) {
        Py_BEGIN_ALLOW_THREADS
        error = make(plan, &work.columns, &at);
        if (!error)
            error = work_through(plan, &work);
        Py_END_ALLOW_THREADS
        if (error == TOO_MANY)
            PyErr_SetString(PyExc_OverflowError, "more values than a column can have");
        else if (error)
            PyErr_NoMemory();
        else if ((failures = list_of(&work.failures)) != NULL)
            capsule = new_capsule(&work.columns);
        if (work.columns.plan != NULL)
            unmake(&work.columns);
    }
    free(work.failures.data);
    PyBuffer_Release(&offsets);
    PyBuffer_Release(&data);
    if (capsule == NULL) {
        Py_XDECREF(failures);
        return NULL;
    }
    return Py_BuildValue("(NN)", capsule, failures);
}

/* --- making a plan -------------------------------------------------------------------------- */

static int is_part(int32_t first, int32_t count, Py_ssize_t whole)
{
    return first >= 0 && count >= 0 && first <= whole && count <= whole - first;
}

static int check_field(const Plan *plan, const Field *field, const Type *type)
{
    int is_message = field->kind == MESSAGE || field->kind == GROUP;
    if (field->kind <= 0 || field->kind >= KINDS || field->oneof >= type->oneofs)
        return 0;
    if (is_message || field->kind == ENUM)
        if (!is_part(field->inner, 1, plan->count[is_message ? TYPES : ENUMS]))
            return 0;
    if (!(field->flags & MAP))
        return 1;
    const Type *entry = is_message ? (const Type *)plan->table[TYPES] + field->inner : NULL;
    return entry != NULL && field->flags & REPEATED && entry->count == 2;
}

/* Check the columns of a message or a list from `*at` on, and what they would take from it. */
static int check_column(const Plan *plan, const Type *type, const Field *field, Py_ssize_t *at)
{
    if (*at >= plan->count[COLUMNS])
        return 0;
    const ColumnPlan *column = (const ColumnPlan *)plan->table[COLUMNS] + (*at)++;
    const Type *types = plan->table[TYPES];
    if (column->kind == LIST) {
        Field one = *field;
        one.flags &= ~REPEATED;
        return type != NULL && field->flags & REPEATED && column->children == 1 &&
               check_column(plan, NULL, &one, at);
    }
    int kind = field->kind == GROUP ? MESSAGE : field->kind;
    if (column->kind != kind || field->flags & REPEATED)
        return 0;
    if (kind == ENUM && column->inner != field->inner)
        return 0;
    if (kind != MESSAGE)
        return column->children == 0;
    const Type *inner = types + field->inner;
    for (int32_t i = 0; i < column->children; i++) {
        if (*at >= plan->count[COLUMNS])
            return 0;
        const ColumnPlan *child = (const ColumnPlan *)plan->table[COLUMNS] + *at;
        if (!is_part(child->slot, 1, inner->count))
            return 0;
        const Field *next = (const Field *)plan->table[FIELDS] + inner->first + child->slot;
        if (!check_column(plan, inner, next, at))
            return 0;
    }
    return 1;
}

static int check_plan(const Plan *plan)
{
    const Type *types = plan->table[TYPES];
    const Enum *enums = plan->table[ENUMS];
    const EnumValue *values = plan->table[VALUES];
    int is_good = plan->count[TYPES] > 0;
    for (Py_ssize_t i = 0; is_good && i < plan->count[TYPES]; i++)
        is_good = types[i].oneofs >= 0 &&
                  is_part(types[i].first, types[i].count, plan->count[FIELDS]);
    for (Py_ssize_t i = 0; is_good && i < plan->count[TYPES]; i++)
        for (int32_t j = 0; is_good && j < types[i].count; j++)
            is_good = check_field(plan, (Field *)plan->table[FIELDS] + types[i].first + j,
                                  types + i);
    for (Py_ssize_t i = 0; is_good && i < plan->count[ENUMS]; i++)
        is_good = is_part(enums[i].first, enums[i].count, plan->count[VALUES]);
    for (Py_ssize_t i = 0; is_good && i < plan->count[VALUES]; i++)
        is_good = is_part(values[i].start, values[i].size, plan->count[NAMES]);
    Field row = {.kind = MESSAGE};
    Py_ssize_t at = 0;
    return is_good && check_column(plan, types, &row, &at) && at == plan->count[COLUMNS];
}

static PyObject *Plan_new(PyTypeObject *kind, PyObject *args, PyObject *kwargs)
{
    static const size_t sizes[TABLES] = {sizeof(Type), sizeof(Field), sizeof(Enum),
                                         sizeof(EnumValue), sizeof(ColumnPlan), 1};
    if (kwargs != NULL && PyDict_GET_SIZE(kwargs))
        return PyErr_Format(PyExc_TypeError, "Plan() takes no keywords");
    const char *bytes[TABLES];
    Py_ssize_t length[TABLES];
    if (!PyArg_ParseTuple(args, "y#y#y#y#y#y#:Plan", &bytes[0], &length[0], &bytes[1], &length[1],
                          &bytes[2], &length[2], &bytes[3], &length[3], &bytes[4], &length[4],
                          &bytes[5], &length[5]))
        return NULL;
    PyPlan *self = (PyPlan *)kind->tp_alloc(kind, 0);
    if (self == NULL)
        return NULL;
    Plan *plan = &self->plan;
    for (int i = 0; i < TABLES; i++) {
        plan->count[i] = length[i] / (Py_ssize_t)sizes[i];
        plan->table[i] = PyMem_Malloc(length[i] ? (size_t)length[i] : 1);
        if (plan->table[i] == NULL) {
            Py_DECREF(self);
            return PyErr_NoMemory();
        }
        memcpy(plan->table[i], bytes[i], (size_t)length[i]);
    }
    if (!check_plan(plan)) {
        Py_DECREF(self);
        return PyErr_Format(PyExc_ValueError, "the tables do not fit together");
    }
    const ColumnPlan *columns = plan->table[COLUMNS];
    for (Py_ssize_t i = 0; i < plan->count[COLUMNS]; i++)
        plan->unchecked |= columns[i].flags & UNCHECKED;
    return (PyObject *)self;
}

static void Plan_dealloc(PyPlan *self)
{
    PyTypeObject *kind = Py_TYPE(self);
    for (int i = 0; i < TABLES; i++)
        PyMem_Free(self->plan.table[i]);
    kind->tp_free((PyObject *)self);
    Py_DECREF(kind);
}

static PyMethodDef plan_methods[] = {
    {"parse", (PyCFunction)Plan_parse, METH_VARARGS,
     "parse(offsets, data, first, count, max_size) -> (array, failures)"},
    {NULL, NULL, 0, NULL}};

static PyType_Slot plan_slots[] = {{Py_tp_new, Plan_new},
                                   {Py_tp_dealloc, Plan_dealloc},
                                   {Py_tp_methods, plan_methods},
                                   {0, NULL}};

static PyType_Spec plan_spec = {.name = "penstock.core.decoding._protobuf.Plan",
                                .basicsize = sizeof(PyPlan),
                                .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
                                .slots = plan_slots};

static int fill(PyObject *module)
{
    PyObject *kind = PyType_FromSpec(&plan_spec);
    int failed = kind == NULL || PyModule_AddObjectRef(module, "Plan", kind) < 0;
    Py_XDECREF(kind);
    return failed ? -1 : 0;
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, fill}, {0, NULL}};

static struct PyModuleDef module_def = {PyModuleDef_HEAD_INIT, .m_name = "_protobuf",
                                        .m_slots = module_slots};

PyMODINIT_FUNC PyInit__protobuf(void) { return PyModuleDef_Init(&module_def); }
