// Plans an op, asks for errors and frees the plan; from_c.rs compiles and runs it.
#include "sieve.h"
#include <stdio.h>
#include <string.h>
#define CHECK(x) if (!(x)) { printf("line %d: %s\n", __LINE__, #x); return 1; }
static const char *request =
    "{\"call\":{\"attention_forward\":{\"scale\":0.125}},"
    "\"gpu\":{\"capability\":[9,0],\"multiprocessors\":132,\"shared_bytes\":232448},\"tensors\":["
    "{\"name\":\"q\",\"shape\":[1,70,4,64],\"dtype\":\"bf16\"},"
    "{\"name\":\"k\",\"shape\":[1,70,2,64],\"dtype\":\"bf16\"},"
    "{\"name\":\"v\",\"shape\":[1,70,2,64],\"dtype\":\"bf16\"},"
    "{\"name\":\"doc_start\",\"shape\":[1,70],\"dtype\":\"i32\"}]}";
int main(void) {
    sieve_plan_t *plan = NULL;
    uint64_t pointers[7] = {0};
    CHECK(sieve_abi() == 2);
    CHECK(sieve_plan("{}", &plan) == -1 && plan == NULL && strstr(sieve_error(), "missing field"));
    CHECK(sieve_plan(NULL, &plan) == -1 && strstr(sieve_error(), "NULL"));
    CHECK(sieve_plan(request, &plan) == 0 && plan);
    CHECK(strstr(sieve_plan_describe(plan), "\"workspace_bytes\":0"));
    CHECK(strstr(sieve_plan_describe(plan), "hopper_attention_forward"));
    CHECK(sieve_plan_run(plan, pointers, 7, NULL) == -1 && strstr(sieve_error(), "not loaded"));
    CHECK(sieve_plan_load(plan, -1, NULL, NULL) == -1 && strstr(sieve_error(), "below 0"));
    CHECK(sieve_plan_load(NULL, 0, NULL, NULL) == -1);
    sieve_plan_free(plan);
    sieve_plan_free(NULL);
    printf("%s\n", "done");
    return 0;
}
