/* A worker in C: gives each text back in reverse.   cc -o reverse reverse.c
 *
 * A message comes as a frame: one digit, which says how many digits follow, the length of the text
 * in hexadecimal, and the text. Results go the same way, and an empty line says that it is done. */
#include <stdio.h>
#include <stdlib.h>

int main(void) {
  char *text = NULL;
  int first;
  while ((first = getchar()) != EOF) {
    char digit[2] = {(char)first, 0}, hex[16] = {0};
    size_t digits = strtoul(digit, NULL, 16);
    if (fread(hex, 1, digits, stdin) != digits) return 1;
    size_t size = strtoull(hex, NULL, 16);
    if (!(text = realloc(text, size + 1))) return 1;
    if (fread(text, 1, size, stdin) != size) return 1;
    printf("%d%zx", snprintf(NULL, 0, "%zx", size), size);
    while (size) putchar(text[--size]);
    putchar('\n');
    fflush(stdout);
  }
  free(text);
  return 0;
}
