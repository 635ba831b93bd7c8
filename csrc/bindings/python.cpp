#include "bindings/python.h"

#include <climits>
#include <new>
#include <stdexcept>

#include "bindings/entry.h"

namespace fewbit::bindings {

void set_error() noexcept {
  try {
    throw;
  } catch (const PythonError&) {
  } catch (const std::invalid_argument& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
}

std::string type_name(PyObject* object) {
  const Object name(PyType_GetName(Py_TYPE(object)));
  return read_text({"type", "name"}, name.get());
}

void refuse_type(const Place& place, const char* expected, PyObject* got) {
  const Object name(PyType_GetName(Py_TYPE(got)));
  PyErr_Format(PyExc_TypeError, "%s: %s: expected %s, got %S", place.function, place.parameter, expected, name.get());
  throw PythonError();
}

// Throws a TypeError if the object has the wrong type or is too large, else the error that Python has set.
[[noreturn]] static void refuse_after_error(const Place& place, const char* expected, PyObject* got) {
  if (!PyErr_ExceptionMatches(PyExc_TypeError) && !PyErr_ExceptionMatches(PyExc_OverflowError)) throw PythonError();
  PyErr_Clear();
  refuse_type(place, expected, got);
}

int64_t read_integer(const Place& place, PyObject* object) {
  const int64_t value = PyLong_AsLongLong(object);
  if (value == -1 && PyErr_Occurred()) refuse_after_error(place, "an integer of 64 bits", object);
  return value;
}

int read_int(const Place& place, PyObject* object) {
  const int64_t value = read_integer(place, object);
  if (value < INT_MIN || value > INT_MAX) refuse(place.parameter, "an integer of 32 bits", std::to_string(value));
  return static_cast<int>(value);
}

double read_number(const Place& place, PyObject* object) {
  const double value = PyFloat_AsDouble(object);
  if (value == -1 && PyErr_Occurred()) refuse_after_error(place, "a number", object);
  return value;
}

bool read_bool(const Place& place, PyObject* object) {
  if (object != Py_True && object != Py_False) refuse_type(place, "True or False", object);
  return object == Py_True;
}

std::string read_text(const Place& place, PyObject* object) {
  if (!PyUnicode_Check(object)) refuse_type(place, "a text", object);
  Py_ssize_t size = 0;
  const char* text = PyUnicode_AsUTF8AndSize(object, &size);
  if (!text) throw PythonError();
  return {text, static_cast<size_t>(size)};
}

std::vector<float> read_floats(const Place& place, PyObject* object) {
  if (!PySequence_Check(object)) refuse_type(place, "a sequence of numbers", object);
  const Py_ssize_t size = PySequence_Size(object);
  if (size < 0) throw PythonError();
  std::vector<float> values(static_cast<size_t>(size));
  for (size_t i = 0; i < values.size(); ++i) {
    const Object item(PySequence_GetItem(object, static_cast<Py_ssize_t>(i)));
    values[i] = static_cast<float>(read_number(place, item.get()));
  }
  return values;
}

SeedArgument read_seed(const Place& place, PyObject* object) {
  if (PyLong_Check(object)) return {read_integer(place, object), true, {}};
  return {0, false, read_buffer(place, object)};
}

void Signature::parse(const std::string& text, const std::string& receiver, const std::string& documentation) {
  const size_t open = text.find('(') + 1;
  name_ = text.substr(0, open - 1);
  documentation_ = name_ + "(" + receiver + (text[open] == ')' ? "" : ", ") + text.substr(open) + "\n--\n\n" + documentation;
  for (size_t begin = open; text[begin] != ')';) {
    const size_t end = text.find_first_of(",)", begin);
    const std::string parameter = text.substr(begin, end - begin);
    const size_t equals = parameter.find('=');
    PyObject* value = nullptr;
    if (equals != std::string::npos) {
      const std::string written = parameter.substr(equals + 1);
      value = written == "None" ? none().release() : to_python(std::stoi(written)).release();
    }
    parameters_.push_back(parameter.substr(0, equals));
    names_.push_back(Object(PyUnicode_InternFromString(parameters_.back().c_str())).release());
    defaults_.push_back(value);
    begin = text.find_first_not_of(", ", end);
  }
}

void Signature::arrange(PyObject* const* given, Py_ssize_t count, PyObject* keywords, PyObject** arguments) const {
  const auto most = static_cast<Py_ssize_t>(names_.size());
  const auto refuse_call = [&](const char* what, PyObject* which) {
    PyErr_Format(PyExc_TypeError, "%s: %s%S", name(), what, which);
    throw PythonError();
  };
  if (count > most) refuse_call("expected fewer arguments, got ", to_python(static_cast<int64_t>(count)).get());
  for (Py_ssize_t i = 0; i < most; ++i) arguments[i] = i < count ? given[i] : nullptr;
  const Py_ssize_t named = keywords ? PyTuple_Size(keywords) : 0;
  for (Py_ssize_t k = 0; k < named; ++k) {
    PyObject* const keyword = PyTuple_GetItem(keywords, k);  // borrowed
    Py_ssize_t i = 0;
    // Python interns the names in a source, so comparing addresses is enough, unless a name was computed.
    while (i < most && names_[i] != keyword) ++i;
    if (i == most) {
      for (i = 0; i < most && PyUnicode_Compare(names_[i], keyword);) ++i;
    }
    if (i == most) refuse_call("unexpected argument ", keyword);
    if (arguments[i]) refuse_call("expected one value, got two for the argument ", keyword);
    arguments[i] = given[count + k];
  }
  for (Py_ssize_t i = 0; i < most; ++i) {
    if (!arguments[i] && !(arguments[i] = defaults_[i])) refuse_call("missing the argument ", names_[i]);
  }
}

}  // namespace fewbit::bindings
