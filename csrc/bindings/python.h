// The layer between C++ and Python: arguments, results, errors, functions and classes. It uses Python's limited API alone, so
// that one build serves all versions of Python.
#pragma once

#include <Python.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "bindings/buffer.h"

namespace fewbit::bindings {

// Thrown if a function of Python failed, which has set Python's error.
struct PythonError {};

// Owns a reference to a Python object.
class Object {
 public:
  // Takes over a new reference, the result of a function of Python, which is null if the function failed.
  explicit Object(PyObject* reference) : reference_(reference) {
    if (!reference) throw PythonError();
  }
  Object(Object&& other) noexcept : reference_(other.release()) {}
  Object(const Object&) = delete;
  Object& operator=(const Object&) = delete;
  ~Object() { Py_XDECREF(reference_); }

  PyObject* get() const { return reference_; }
  PyObject* release() { return std::exchange(reference_, nullptr); }

 private:
  PyObject* reference_;
};

inline Object none() { return Object(Py_NewRef(Py_None)); }

// Sets Python's error from the C++ exception that is being handled: ValueError for std::invalid_argument, else RuntimeError.
void set_error() noexcept;

// Returns the result of work(), an Object, to Python; null after an exception.
template <class Work>
PyObject* returned(Work work) noexcept {
  try {
    return work().release();
  } catch (...) {
    set_error();
    return nullptr;
  }
}

// Lets other threads run Python as long as it exists.
class WithoutPython {
 public:
  WithoutPython() : state_(PyEval_SaveThread()) {}
  WithoutPython(const WithoutPython&) = delete;
  ~WithoutPython() { PyEval_RestoreThread(state_); }

 private:
  PyThreadState* state_;
};

// -- Results --------------------------------------------------------------------------------------------------------------------

inline Object to_python(bool value) { return Object(PyBool_FromLong(value)); }
inline Object to_python(int64_t value) { return Object(PyLong_FromLongLong(value)); }
inline Object to_python(int value) { return Object(PyLong_FromLong(value)); }
inline Object to_python(const std::string& text) {
  return Object(PyUnicode_FromStringAndSize(text.data(), static_cast<Py_ssize_t>(text.size())));
}

template <class A, class B>
Object to_python(const std::pair<A, B>& pair) {
  return Object(PyTuple_Pack(2, to_python(pair.first).get(), to_python(pair.second).get()));
}

template <class T>
Object to_python(const std::vector<T>& items) {
  Object tuple(PyTuple_New(static_cast<Py_ssize_t>(items.size())));
  for (size_t i = 0; i < items.size(); ++i) {
    PyTuple_SetItem(tuple.get(), static_cast<Py_ssize_t>(i), to_python(items[i]).release());
  }
  return tuple;
}

// -- Classes --------------------------------------------------------------------------------------------------------------------

template <class T>
struct Instance {
  PyObject_HEAD
  T* value;
};

template <class T>
PyTypeObject* python_class = nullptr;

template <class T>
const T& value_of(PyObject* instance) {
  return *reinterpret_cast<Instance<T>*>(instance)->value;
}

// Returns a new Python object that owns a value.
template <class T>
Object made(std::unique_ptr<T> value) {
  Object instance(PyType_GenericAlloc(python_class<T>, 0));
  reinterpret_cast<Instance<T>*>(instance.get())->value = value.release();
  return instance;
}

template <class T>
void destroy(PyObject* instance) {
  PyTypeObject* const type = Py_TYPE(instance);
  delete reinterpret_cast<Instance<T>*>(instance)->value;
  reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(instance);
  Py_DECREF(type);
}

// Makes the Python class of T. C++ alone makes its instances. name: with that of the module. The arrays are never released.
template <class T>
void make_class(const char* name, const char* documentation, PyMethodDef* methods, PyGetSetDef* properties) {
  PyType_Slot slots[] = {{Py_tp_doc, const_cast<char*>(documentation)},
                         {Py_tp_dealloc, reinterpret_cast<void*>(&destroy<T>)},
                         {Py_tp_methods, methods},
                         {Py_tp_getset, properties},
                         {0, nullptr}};
  constexpr auto flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_IMMUTABLETYPE;
  PyType_Spec spec = {name, sizeof(Instance<T>), 0, static_cast<unsigned>(flags), slots};
  python_class<T> = reinterpret_cast<PyTypeObject*>(Object(PyType_FromSpec(&spec)).release());
}

// -- Arguments ------------------------------------------------------------------------------------------------------------------

// The place of an argument, for errors: "encode: x".
struct Place {
  const char* function;
  const char* parameter;
};

std::string type_name(PyObject* object);

// Throws a TypeError.
[[noreturn]] void refuse_type(const Place& place, const char* expected, PyObject* got);

int64_t read_integer(const Place& place, PyObject* object);
int read_int(const Place& place, PyObject* object);
double read_number(const Place& place, PyObject* object);
bool read_bool(const Place& place, PyObject* object);
std::string read_text(const Place& place, PyObject* object);
std::vector<float> read_floats(const Place& place, PyObject* object);
Buffer read_buffer(const Place& place, PyObject* object);
SeedArgument read_seed(const Place& place, PyObject* object);

// Returns a value of C++ for an argument; for a class, a reference to the value of the instance.
template <class T>
decltype(auto) read(const Place& place, PyObject* object) {
  if constexpr (std::is_same_v<T, Buffer>) {
    return read_buffer(place, object);
  } else if constexpr (std::is_same_v<T, SeedArgument>) {
    return read_seed(place, object);
  } else if constexpr (std::is_same_v<T, bool>) {
    return read_bool(place, object);
  } else if constexpr (std::is_same_v<T, int>) {
    return read_int(place, object);
  } else if constexpr (std::is_same_v<T, int64_t>) {
    return read_integer(place, object);
  } else if constexpr (std::is_floating_point_v<T>) {
    return static_cast<T>(read_number(place, object));
  } else if constexpr (std::is_same_v<T, std::string>) {
    return read_text(place, object);
  } else if constexpr (std::is_same_v<T, std::vector<float>>) {
    return read_floats(place, object);
  } else if constexpr (std::is_same_v<T, PyObject*>) {
    return static_cast<PyObject*>(object);
  } else {
    if (Py_TYPE(object) != python_class<T>) refuse_type(place, "an instance of fewbit._kernels", object);
    return value_of<T>(object);
  }
}

// -- Functions ------------------------------------------------------------------------------------------------------------------

// The name and the parameters of a function, and its documentation.
class Signature {
 public:
  // text: as in Python, such as "pack(codes, bits, inner=1)". Defaults are None or integers. receiver: $self or $module.
  void parse(const std::string& text, const std::string& receiver, const std::string& documentation);

  const char* name() const { return name_.c_str(); }
  const char* documentation() const { return documentation_.c_str(); }
  Place place(size_t parameter) const { return {name(), parameters_[parameter].c_str()}; }

  // Writes the arguments of a call in the order of the parameters. keywords: the names of the last arguments, or null.
  void arrange(PyObject* const* given, Py_ssize_t count, PyObject* keywords, PyObject** arguments) const;

 private:
  std::string name_, documentation_;
  std::vector<std::string> parameters_;
  std::vector<PyObject*> names_, defaults_;  // null for a parameter without a default; never released
};

template <auto function>
Signature signature;

template <class Function>
struct Callable;

template <class R, class... A>
struct Callable<R (*)(A...)> {
  using Result = R;
  using Receiver = void;
  using Arguments = std::tuple<std::decay_t<A>...>;
};

template <class R, class T, class... A>
struct Callable<R (T::*)(A...) const> {
  using Result = R;
  using Receiver = T;
  using Arguments = std::tuple<std::decay_t<A>...>;
};

// Calls a C++ function or method. It runs without Python's lock unless its result is an Object.
template <auto function, size_t... I>
Object call_with(PyObject* self, PyObject* const* arguments, std::index_sequence<I...>) {
  using Type = Callable<decltype(function)>;
  using Arguments = typename Type::Arguments;
  const Signature& of = signature<function>;
  // Braces, so that the first wrong argument is the one that is refused.
  std::tuple<decltype(read<std::tuple_element_t<I, Arguments>>(of.place(I), nullptr))...> values{
      read<std::tuple_element_t<I, Arguments>>(of.place(I), arguments[I])...};
  const auto run = [&]() -> typename Type::Result {
    if constexpr (std::is_void_v<typename Type::Receiver>) {
      (void)self;
      return function(std::get<I>(values)...);
    } else {
      return (value_of<typename Type::Receiver>(self).*function)(std::get<I>(values)...);
    }
  };
  const auto run_without_python = [&] {
    const WithoutPython other_threads;
    return run();
  };
  if constexpr (std::is_same_v<typename Type::Result, Object>) {
    return run();
  } else if constexpr (std::is_void_v<typename Type::Result>) {
    run_without_python();
    return none();
  } else {
    return to_python(run_without_python());
  }
}

template <auto function>
PyObject* call(PyObject* self, PyObject* const* given, Py_ssize_t count, PyObject* keywords) noexcept {
  constexpr size_t parameters = std::tuple_size_v<typename Callable<decltype(function)>::Arguments>;
  return returned([&] {
    PyObject* arguments[parameters + 1];  // an array has at least one item
    if (keywords || count != static_cast<Py_ssize_t>(parameters)) {
      signature<function>.arrange(given, count, keywords, arguments);
      given = arguments;
    }
    return call_with<function>(self, given, std::make_index_sequence<parameters>());
  });
}

// Returns the entry of a C++ function or method in the table of a module or of a class.
template <auto function>
PyMethodDef method(const char* text, const char* documentation = "") {
  constexpr bool is_free = std::is_void_v<typename Callable<decltype(function)>::Receiver>;
  signature<function>.parse(text, is_free ? "$module" : "$self", documentation);
  const auto called = reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&call<function>));
  return {signature<function>.name(), called, METH_FASTCALL | METH_KEYWORDS, signature<function>.documentation()};
}

// Returns the entry of a method without arguments in the table of a class, as an attribute.
template <auto getter>
PyGetSetDef property(const char* name, const char* documentation = "") {
  using T = typename Callable<decltype(getter)>::Receiver;
  const auto get = [](PyObject* self, void*) noexcept {
    return returned([&] { return to_python((value_of<T>(self).*getter)()); });
  };
  return {name, get, nullptr, documentation, nullptr};
}

// Adds functions to a module. The array is never released.
inline void add_functions(PyObject* module, PyMethodDef* functions) {
  if (PyModule_AddFunctions(module, functions)) throw PythonError();
}

inline void add(PyObject* module, const char* name, const Object& value) {
  if (PyModule_AddObjectRef(module, name, value.get())) throw PythonError();
}

}  // namespace fewbit::bindings
