/* What does a protobuf payload say?
 *
 * It is parsed into messages of slots, by the rules of the protobuf library: of a single value the
 * last counts, messages that come again are merged, a oneof has one member, a map one entry a key,
 * and what is not known is left out.
 *
 * Memory is only taken for bytes that are there: no length is believed before it is known to end
 * inside of the payload.
 */
#ifndef PENSTOCK_MESSAGES_H
#define PENSTOCK_MESSAGES_H

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* --- the plan ------------------------------------------------------------------------------- */

/* Types of fields, by the numbers of descriptor.proto. */
enum {
    DOUBLE = 1, FLOAT, INT64, UINT64, INT32, FIXED64, FIXED32, BOOL, STRING, GROUP, MESSAGE, BYTES,
    UINT32, ENUM, SFIXED32, SFIXED64, SINT32, SINT64, KINDS,
    LIST = KINDS /* of columns only */
};

enum { VARINT, I64, DELIMITED, START, END, I32 }; /* wire types */

static const uint8_t wire_of[KINDS] = {
    [DOUBLE] = I64, [FLOAT] = I32, [INT64] = VARINT, [UINT64] = VARINT, [INT32] = VARINT,
    [FIXED64] = I64, [FIXED32] = I32, [BOOL] = VARINT, [STRING] = DELIMITED, [GROUP] = START,
    [MESSAGE] = DELIMITED, [BYTES] = DELIMITED, [UINT32] = VARINT, [ENUM] = VARINT,
    [SFIXED32] = I32, [SFIXED64] = I64, [SINT32] = VARINT, [SINT64] = VARINT};

/* Bytes of one element of a repeated field in memory. */
static const uint8_t width_of[KINDS] = {
    [DOUBLE] = 8, [FLOAT] = 4, [INT64] = 8, [UINT64] = 8, [INT32] = 4, [FIXED64] = 8,
    [FIXED32] = 4, [BOOL] = 1, [STRING] = 16, [GROUP] = 8, [MESSAGE] = 8, [BYTES] = 16,
    [UINT32] = 4, [ENUM] = 4, [SFIXED32] = 4, [SFIXED64] = 8, [SINT32] = 4, [SINT64] = 8};

enum { REPEATED = 1, REQUIRED = 2, UTF8 = 4, CLOSED = 8, MAP = 16 }; /* flags of fields */
enum { NULLABLE = 1, UNCHECKED = 2 };                                 /* flags of columns */

typedef struct {
    int32_t number, kind, flags;
    int32_t inner; /* the message type, or the enum; -1: none */
    int32_t oneof; /* -1: none */
} Field;

typedef struct {
    int32_t first, count; /* of its fields, which ascend by number */
    int32_t oneofs;
    int32_t deep; /* has required fields or maps, perhaps further inside */
} Type;

typedef struct {
    int32_t first, count; /* of its values, which ascend by number */
} Enum;

typedef struct {
    int32_t number, start, size; /* where its name is */
} EnumValue;

typedef struct {
    int32_t kind, flags;
    int32_t slot;  /* the field's place in its message */
    int32_t inner; /* the enum; -1: none */
    int32_t children;
} ColumnPlan; /* in the order of a walk from the top; the first is the struct of a row */

enum { TYPES, FIELDS, ENUMS, VALUES, COLUMNS, NAMES, TABLES };

typedef struct {
    void *table[TABLES];
    ptrdiff_t count[TABLES];
    int unchecked; /* some text has to be looked at before it is appended */
} Plan;

/* --- memory of one payload ------------------------------------------------------------------ */

typedef struct Block {
    struct Block *next;
    size_t size, used;
    _Alignas(16) uint8_t data[];
} Block;

typedef struct {
    Block *first, *current;
} Arena;

static void *take(Arena *arena, size_t size)
{
    size = (size + 15) & ~(size_t)15;
    Block *block = arena->current;
    while (block != NULL && block->size - block->used < size)
        block = block->next;
    if (block == NULL) {
        size_t room = size > 65536 ? size : 65536;
        block = malloc(sizeof(Block) + room);
        if (block == NULL)
            return NULL;
        block->size = room;
        block->used = 0;
        /* Behind the current one: those before it stay full. */
        Block **place = arena->current ? &arena->current->next : &arena->first;
        block->next = *place;
        *place = block;
    }
    arena->current = block;
    void *found = block->data + block->used;
    block->used += size;
    return found;
}

static void empty(Arena *arena)
{
    for (Block *block = arena->first; block != NULL; block = block->next)
        block->used = 0;
    arena->current = arena->first;
}

static void drop(Arena *arena)
{
    for (Block *block = arena->first, *next; block != NULL; block = next) {
        next = block->next;
        free(block);
    }
}

/* --- messages ------------------------------------------------------------------------------- */

typedef struct Slot Slot;

typedef struct {
    uint8_t *data;
    size_t count, capacity;
} Array;

/* One field of a message. A message is as many slots as its type has fields, and one for each
 * oneof, whose number is the place of its present member, counted from 1. */
struct Slot {
    union {
        uint64_t number; /* floats as their bits, and signed numbers extended to 64 bits */
        const uint8_t *text;
        Slot *message;
        Array *array;
    };
    uint32_t size; /* of the text */
    uint32_t present;
};

enum {
    FINE, CUT, LONG_NUMBER, BAD_TAG, BAD_GROUP, TOO_DEEP, BAD_TEXT, MISSING, TOO_LARGE,
    NO_MEMORY, TOO_MANY /* these two are not about one payload */
};

enum { DEEPEST = 100 };

typedef struct {
    const Plan *plan;
    Arena arena;
    int depth;   /* how many levels are left */
    int unknown; /* the message that was parsed last has a field that is not known */
    int error;
    const Field *where; /* or NULL */
} Parser;

static const uint8_t *fail(Parser *parser, int error, const Field *where)
{
    parser->error = error;
    parser->where = where;
    return NULL;
}

static Slot *new_message(Parser *parser, int32_t type)
{
    const Type *kind = (const Type *)parser->plan->table[TYPES] + type;
    size_t size = ((size_t)kind->count + (size_t)kind->oneofs) * sizeof(Slot);
    Slot *message = take(&parser->arena, size);
    if (message == NULL)
        fail(parser, NO_MEMORY, NULL);
    else if (size)
        memset(message, 0, size);
    return message;
}

/* Return room for `more` elements behind those of a repeated field. */
static uint8_t *extend(Parser *parser, Slot *slot, size_t width, size_t more)
{
    Array *array = slot->array;
    if (array == NULL) {
        array = take(&parser->arena, sizeof(Array));
        if (array == NULL)
            return (void)fail(parser, NO_MEMORY, NULL), NULL;
        memset(array, 0, sizeof *array);
        slot->array = array;
        slot->present = 1;
    }
    if (array->capacity - array->count < more) {
        size_t capacity = array->capacity ? array->capacity * 2 : 4;
        if (capacity < array->count + more)
            capacity = array->count + more;
        uint8_t *data = take(&parser->arena, capacity * width);
        if (data == NULL)
            return (void)fail(parser, NO_MEMORY, NULL), NULL;
        if (array->count)
            memcpy(data, array->data, array->count * width);
        array->data = data;
        array->capacity = capacity;
    }
    uint8_t *room = array->data + array->count * width;
    array->count += more;
    return room;
}

static Slot element(const Array *array, int32_t kind, size_t index)
{
    Slot slot = {.present = 1};
    const uint8_t *at = array->data + index * width_of[kind];
    switch (kind) {
    case STRING: case BYTES: memcpy(&slot, at, sizeof slot); break;
    case BOOL: slot.number = *at; break;
    case MESSAGE: case GROUP: memcpy(&slot.message, at, sizeof slot.message); break;
    default:
        if (width_of[kind] == 8) {
            memcpy(&slot.number, at, 8);
        } else {
            int32_t number;
            memcpy(&number, at, 4);
            slot.number = (uint64_t)(int64_t)number;
        }
    }
    return slot;
}

/* --- parsing -------------------------------------------------------------------------------- */

static inline const uint8_t *read_varint(Parser *parser, const uint8_t *at, const uint8_t *end,
                                         int most, uint64_t *found)
{
    if (at < end && *at < 0x80) { /* as most are */
        *found = *at;
        return at + 1;
    }
    uint64_t value = 0;
    for (int i = 0; i < most; i++, at++) {
        if (at == end)
            return fail(parser, CUT, NULL);
        value |= (uint64_t)(*at & 0x7f) << (7 * i); /* what is above 64 bits goes */
        if (*at < 0x80) {
            *found = value;
            return at + 1;
        }
    }
    return fail(parser, LONG_NUMBER, NULL);
}

static const uint8_t *read_tag(Parser *parser, const uint8_t *at, const uint8_t *end, uint32_t *tag)
{
    uint64_t value = 0;
    if ((at = read_varint(parser, at, end, 5, &value)) == NULL)
        return NULL;
    if (value > UINT32_MAX)
        return fail(parser, BAD_TAG, NULL);
    *tag = (uint32_t)value;
    return at;
}

/* Read a length that ends inside of what there is. */
static const uint8_t *read_size(Parser *parser, const uint8_t *at, const uint8_t *end, size_t *size)
{
    uint64_t value = 0;
    if ((at = read_varint(parser, at, end, 5, &value)) == NULL)
        return NULL;
    if (value > INT32_MAX || value > (uint64_t)(end - at))
        return fail(parser, CUT, NULL);
    *size = (size_t)value;
    return at;
}

/* Go over a value that nobody asks for. */
static const uint8_t *skip(Parser *parser, const uint8_t *at, const uint8_t *end, uint32_t tag)
{
    uint64_t number = 0;
    size_t size = 0;
    switch (tag & 7) {
    case VARINT:
        return read_varint(parser, at, end, 10, &number);
    case I64: case I32:
        size = (tag & 7) == I64 ? 8 : 4;
        return (size_t)(end - at) < size ? fail(parser, CUT, NULL) : at + size;
    case DELIMITED:
        at = read_size(parser, at, end, &size);
        return at == NULL ? NULL : at + size;
    case START:
        if (--parser->depth < 0)
            return fail(parser, TOO_DEEP, NULL);
        for (;;) {
            uint32_t inner = 0;
            if ((at = read_tag(parser, at, end, &inner)) == NULL)
                return NULL;
            if ((inner & 7) == END) {
                parser->depth++;
                return inner >> 3 == tag >> 3 ? at : fail(parser, BAD_GROUP, NULL);
            }
            if ((at = skip(parser, at, end, inner)) == NULL)
                return NULL;
        }
    case END:
        return fail(parser, BAD_GROUP, NULL);
    }
    return fail(parser, BAD_TAG, NULL);
}

static int is_utf8(const uint8_t *at, size_t size)
{
    const uint8_t *end = at + size;
    while (at < end) {
        uint64_t eight;
        if (end - at >= 8 && (memcpy(&eight, at, 8), (eight & 0x8080808080808080u) == 0)) {
            at += 8;
            continue;
        }
        uint8_t first = *at++;
        if (first < 0x80)
            continue;
        int more = first < 0xe0 ? 1 : first < 0xf0 ? 2 : 3;
        if (first < 0xc2 || first > 0xf4 || end - at < more)
            return 0;
        /* The second byte tells what could be shorter, is a surrogate, or above U+10FFFF. */
        uint8_t low = first == 0xe0 ? 0xa0 : first == 0xf0 ? 0x90 : 0x80;
        uint8_t high = first == 0xed ? 0x9f : first == 0xf4 ? 0x8f : 0xbf;
        if (*at < low || *at > high)
            return 0;
        for (int i = 1; i < more; i++)
            if ((at[i] & 0xc0) != 0x80)
                return 0;
        at += more;
    }
    return 1;
}

static uint64_t as_kind(int32_t kind, uint64_t value)
{
    switch (kind) {
    case BOOL: return value != 0;
    case SINT32: return (uint64_t)(int64_t)(int32_t)((uint32_t)value >> 1 ^ -((uint32_t)value & 1));
    case SINT64: return value >> 1 ^ -(value & 1);
    case INT32: case ENUM: case UINT32: return (uint64_t)(int64_t)(int32_t)(uint32_t)value;
    }
    return value;
}

static const EnumValue *find_value(const Plan *plan, int32_t inner, int32_t number)
{
    const Enum *names = (const Enum *)plan->table[ENUMS] + inner;
    const EnumValue *values = (const EnumValue *)plan->table[VALUES] + names->first;
    int32_t low = 0, high = names->count;
    while (low < high) {
        int32_t middle = (low + high) / 2;
        if (values[middle].number < number)
            low = middle + 1;
        else
            high = middle;
    }
    return low < names->count && values[low].number == number ? values + low : NULL;
}

/* Tell whether the field can have a value: that of a closed enum is known, or is no value of it. */
static int is_known(const Plan *plan, const Field *field, uint64_t value)
{
    return !(field->flags & CLOSED) || find_value(plan, field->inner, (int32_t)value) != NULL;
}

static void put_number(uint8_t *room, size_t width, uint64_t value)
{
    uint32_t half = (uint32_t)value;
    if (width == 8)
        memcpy(room, &value, 8);
    else if (width == 4)
        memcpy(room, &half, 4);
    else
        *room = (uint8_t)value;
}

static const uint8_t *read_packed(Parser *parser, const uint8_t *at, const uint8_t *end,
                                  const Field *field, Slot *slot)
{
    size_t size = 0, width = width_of[field->kind];
    if ((at = read_size(parser, at, end, &size)) == NULL)
        return NULL;
    end = at + size;
    if (wire_of[field->kind] != VARINT) {
        if (size % width)
            return fail(parser, CUT, field);
        uint8_t *room = size ? extend(parser, slot, width, size / width) : NULL;
        if (room != NULL)
            memcpy(room, at, size);
        return room != NULL || !size ? end : NULL;
    }
    while (at < end) {
        uint64_t value = 0;
        if ((at = read_varint(parser, at, end, 10, &value)) == NULL)
            return NULL;
        value = as_kind(field->kind, value);
        if (!is_known(parser->plan, field, value)) {
            parser->unknown = 1;
            continue;
        }
        uint8_t *room = extend(parser, slot, width, 1);
        if (room == NULL)
            return NULL;
        put_number(room, width, value);
    }
    return at;
}

static const uint8_t *parse(Parser *parser, const uint8_t *at, const uint8_t *end, int32_t type,
                            Slot *message, uint32_t group);

static const uint8_t *read_message(Parser *parser, const uint8_t *at, const uint8_t *end,
                                   const Field *field, Slot *message)
{
    if (--parser->depth < 0)
        return fail(parser, TOO_DEEP, field);
    if (field->kind == GROUP) {
        at = parse(parser, at, end, field->inner, message, (uint32_t)field->number);
    } else {
        size_t size = 0;
        if ((at = read_size(parser, at, end, &size)) == NULL)
            return NULL;
        at = parse(parser, at, at + size, field->inner, message, 0);
    }
    parser->depth++;
    return at;
}

/* Make a field the one of its oneof that is present. */
static void choose(const Type *type, Slot *message, const Field *field, size_t index)
{
    if (field->oneof < 0)
        return;
    Slot *oneof = message + type->count + field->oneof;
    if (oneof->number != index + 1) {
        if (oneof->number)
            memset(message + (oneof->number - 1), 0, sizeof(Slot));
        oneof->number = index + 1;
    }
}

/* Read a message into its field: one more of several, or more of the same. */
static const uint8_t *read_inner(Parser *parser, const uint8_t *at, const uint8_t *end,
                                 const Field *field, Slot *slot)
{
    Slot *inner = field->flags & REPEATED ? NULL : slot->message;
    if (inner == NULL && (inner = new_message(parser, field->inner)) == NULL)
        return NULL;
    int unknown = parser->unknown; /* what is unknown inside does not count here */
    if ((at = read_message(parser, at, end, field, inner)) == NULL)
        return NULL;
    int dropped = field->flags & MAP && parser->unknown;
    parser->unknown = unknown;
    if (dropped) { /* the library takes such an entry for unknown as a whole */
        parser->unknown = 1;
        return at;
    }
    if (field->flags & MAP) { /* the value is there, said or not */
        const Type *entry = (const Type *)parser->plan->table[TYPES] + field->inner;
        const Field *value = (const Field *)parser->plan->table[FIELDS] + entry->first + 1;
        if ((value->kind == MESSAGE || value->kind == GROUP) && !inner[1].present) {
            inner[1].present = 1;
            if ((inner[1].message = new_message(parser, value->inner)) == NULL)
                return NULL;
        }
    }
    if (field->flags & REPEATED) {
        uint8_t *room = extend(parser, slot, sizeof inner, 1);
        if (room == NULL)
            return NULL;
        memcpy(room, &inner, sizeof inner);
    } else {
        slot->message = inner;
        slot->present = 1;
    }
    return at;
}

static const uint8_t *read_single(Parser *parser, const uint8_t *at, const uint8_t *end,
                                  const Field *field, Slot *found)
{
    size_t size = 0;
    uint64_t value = 0;
    switch (wire_of[field->kind]) {
    case VARINT:
        if ((at = read_varint(parser, at, end, 10, &value)) == NULL)
            return NULL;
        found->number = as_kind(field->kind, value);
        return at;
    case DELIMITED:
        if ((at = read_size(parser, at, end, &size)) == NULL)
            return NULL;
        if (field->flags & UTF8 && !is_utf8(at, size))
            return fail(parser, BAD_TEXT, field);
        found->text = at;
        found->size = (uint32_t)size;
        return at + size;
    }
    size = width_of[field->kind];
    if ((size_t)(end - at) < size)
        return fail(parser, CUT, field);
    Array one = {.data = (uint8_t *)(uintptr_t)at};
    found->number = element(&one, field->kind, 0).number;
    return at + size;
}

/* Read one value of a field whose tag was read; it may be of another kind, and unknown then. */
static const uint8_t *read_field(Parser *parser, const uint8_t *at, const uint8_t *end,
                                 uint32_t tag, const Type *type, size_t index, Slot *message)
{
    const Field *field = (const Field *)parser->plan->table[FIELDS] + type->first + index;
    Slot *slot = message + index;
    int wire = wire_of[field->kind], is_repeated = field->flags & REPEATED;
    if ((tag & 7) == DELIMITED && is_repeated && wire != DELIMITED && wire != START)
        return read_packed(parser, at, end, field, slot);
    if ((int)(tag & 7) != wire) {
        parser->unknown = 1;
        return skip(parser, at, end, tag);
    }
    if (field->kind == MESSAGE || field->kind == GROUP) {
        choose(type, message, field, index);
        return read_inner(parser, at, end, field, slot);
    }
    Slot found = {.present = 1};
    if ((at = read_single(parser, at, end, field, &found)) == NULL)
        return NULL;
    if (!is_known(parser->plan, field, found.number)) {
        parser->unknown = 1;
    } else if (is_repeated) {
        size_t width = width_of[field->kind];
        uint8_t *room = extend(parser, slot, width, 1);
        if (room == NULL)
            return NULL;
        if (width == sizeof(Slot))
            memcpy(room, &found, sizeof found);
        else
            put_number(room, width, found.number);
    } else {
        choose(type, message, field, index);
        *slot = found;
    }
    return at;
}

/* Return the place of a field, or the number of fields. They mostly come in ascending order. */
static size_t find_field(const Field *fields, size_t count, uint32_t number, size_t hint)
{
    for (size_t next = hint; next < count && next < hint + 2; next++)
        if ((uint32_t)fields[next].number == number)
            return next;
    size_t low = 0, high = count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if ((uint32_t)fields[middle].number < number)
            low = middle + 1;
        else
            high = middle;
    }
    return low < count && (uint32_t)fields[low].number == number ? low : count;
}

/* Read fields up to the end, or up to the end of a group of that number. */
static const uint8_t *parse(Parser *parser, const uint8_t *at, const uint8_t *end, int32_t type,
                            Slot *message, uint32_t group)
{
    const Type *kind = (const Type *)parser->plan->table[TYPES] + type;
    const Field *fields = (const Field *)parser->plan->table[FIELDS] + kind->first;
    size_t count = (size_t)kind->count, index = 0;
    parser->unknown = 0;
    while (at < end) {
        uint32_t tag = 0;
        if ((at = read_tag(parser, at, end, &tag)) == NULL)
            return NULL;
        if (tag >> 3 == 0) /* which the library takes inside of groups that it does not know */
            return fail(parser, BAD_TAG, NULL);
        if ((tag & 7) == END)
            return tag >> 3 == group ? at : fail(parser, BAD_GROUP, NULL);
        size_t found = find_field(fields, count, tag >> 3, index);
        if (found < count) {
            at = read_field(parser, at, end, tag, kind, index = found, message);
        } else {
            parser->unknown = 1;
            at = skip(parser, at, end, tag);
        }
        if (at == NULL)
            return NULL;
    }
    return group ? fail(parser, CUT, NULL) : at;
}

/* --- what can only be told of a whole message ----------------------------------------------- */

typedef struct {
    Slot *entry;
    size_t index;
} Keyed;

static int by_number(const void *left, const void *right)
{
    const Keyed *a = left, *b = right;
    if (a->entry->number != b->entry->number)
        return a->entry->number < b->entry->number ? -1 : 1;
    return a->index < b->index ? -1 : a->index > b->index;
}

static int by_text(const void *left, const void *right)
{
    const Keyed *a = left, *b = right;
    uint32_t size = a->entry->size;
    if (size != b->entry->size)
        return size < b->entry->size ? -1 : 1;
    int order = size ? memcmp(a->entry->text, b->entry->text, size) : 0;
    return order ? order : a->index < b->index ? -1 : a->index > b->index;
}

/* Leave one entry a key: the last. Sorted, so that no choice of keys makes it slow. */
static int leave_last(Parser *parser, Array *array, int32_t kind)
{
    if (array->count < 2)
        return 0;
    Slot **entries = (Slot **)(void *)array->data;
    Keyed *keyed = take(&parser->arena, array->count * sizeof(Keyed));
    if (keyed == NULL)
        return fail(parser, NO_MEMORY, NULL), -1;
    for (size_t i = 0; i < array->count; i++)
        keyed[i] = (Keyed){entries[i], i};
    qsort(keyed, array->count, sizeof(Keyed), kind == STRING ? by_text : by_number);
    for (size_t i = 0; i + 1 < array->count; i++) {
        const Slot *key = keyed[i].entry, *next = keyed[i + 1].entry;
        int is_same = kind == STRING ? key->size == next->size &&
                          (!key->size || !memcmp(key->text, next->text, key->size))
                                     : key->number == next->number;
        if (is_same)
            entries[keyed[i].index] = NULL;
    }
    size_t kept = 0;
    for (size_t i = 0; i < array->count; i++)
        if (entries[i] != NULL)
            entries[kept++] = entries[i];
    array->count = kept;
    return 0;
}

/* Look for required fields that are missing, and make one entry of several with the same key. */
static int finish(Parser *parser, int32_t type, Slot *message)
{
    const Type *types = parser->plan->table[TYPES], *kind = types + type;
    const Field *fields = (const Field *)parser->plan->table[FIELDS] + kind->first;
    for (int32_t i = 0; kind->deep && i < kind->count; i++) {
        const Field *field = fields + i;
        Slot *slot = message + i;
        if (!slot->present) {
            if (field->flags & REQUIRED)
                return fail(parser, MISSING, field), -1;
            continue;
        }
        if (field->kind != MESSAGE && field->kind != GROUP)
            continue;
        if (field->flags & MAP) {
            const Field *key = (const Field *)parser->plan->table[FIELDS] +
                               types[field->inner].first;
            if (leave_last(parser, slot->array, key->kind) < 0)
                return -1;
        }
        if (!types[field->inner].deep)
            continue;
        size_t count = field->flags & REPEATED ? slot->array->count : 1;
        for (size_t each = 0; each < count; each++) {
            Slot *inner = field->flags & REPEATED
                              ? element(slot->array, field->kind, each).message : slot->message;
            if (finish(parser, field->inner, inner) < 0)
                return -1;
        }
    }
    return 0;
}

#endif
