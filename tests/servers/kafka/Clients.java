import java.io.BufferedOutputStream;
import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Base64;
import java.util.Collection;
import java.util.HashMap;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Objects;
import java.util.Optional;
import java.util.Properties;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.Future;
import java.util.concurrent.Semaphore;
import java.util.concurrent.atomic.AtomicBoolean;
import java.util.stream.Collectors;

import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.Config;
import org.apache.kafka.clients.admin.ConfigEntry;
import org.apache.kafka.clients.admin.CreateTopicsOptions;
import org.apache.kafka.clients.admin.CreateTopicsResult;
import org.apache.kafka.clients.admin.DescribeClusterResult;
import org.apache.kafka.clients.admin.ListOffsetsResult.ListOffsetsResultInfo;
import org.apache.kafka.clients.admin.NewPartitions;
import org.apache.kafka.clients.admin.NewTopic;
import org.apache.kafka.clients.admin.OffsetSpec;
import org.apache.kafka.clients.admin.TopicDescription;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.ConsumerRecords;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.consumer.OffsetAndTimestamp;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.clients.producer.RecordMetadata;
import org.apache.kafka.common.Node;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.TopicPartitionInfo;
import org.apache.kafka.common.config.ConfigResource;
import org.apache.kafka.common.header.Header;
import org.apache.kafka.common.header.internals.RecordHeader;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;
import org.apache.kafka.common.serialization.ByteArraySerializer;

/**
 * Kafka's own Java clients as a program: lines of tab-separated fields in, lines of JSON out.
 *
 * <pre>
 * Clients produce BOOTSTRAP [name=value ...]         stdin: topic, partition or -, timestamp or -, key, value, header name, header value, ...
 * Clients number  BOOTSTRAP TOPIC PARTITIONS UNANSWERED [name=value ...]   stdin: nothing; sends until it ends
 * Clients consume BOOTSTRAP TIMEOUT_MS [name=value ...]   stdin: topic, partition, from, until
 * Clients drain   BOOTSTRAP TIMEOUT_MS [name=value ...]   the same, but only counts
 * Clients admin   BOOTSTRAP [name=value ...]         stdin: operation, arguments
 * </pre>
 *
 * Keys, values and headers are base64, "-" is null. name=value are properties of the client. In `produce` an
 * empty line waits for all before it, so that the caller decides where batches end. An error of one record or
 * operation is its line; any other ends the program with one line {"error", "message"} and status 1.
 */
public final class Clients {
    private static final Duration POLL = Duration.ofMillis(200);
    private static final PrintStream OUT = new PrintStream(new BufferedOutputStream(System.out, 1 << 16), false, StandardCharsets.UTF_8);

    public static void main(String[] arguments) throws IOException {
        boolean reads = arguments[0].equals("consume") || arguments[0].equals("drain");
        Properties properties = new Properties();
        properties.put("bootstrap.servers", arguments[1]);
        try (BufferedReader in = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8))) {
            int rest = reads ? 3 : 2;
            switch (arguments[0]) {
                case "produce" -> {
                    properties.put("acks", "all");
                    properties.put("enable.idempotence", "false");
                    set(properties, arguments, rest);
                    produce(in, properties);
                }
                case "number" -> {
                    set(properties, arguments, 5);
                    number(in, properties, arguments[2], Integer.parseInt(arguments[3]), Integer.parseInt(arguments[4]));
                }
                case "consume", "drain" -> {
                    properties.put("enable.auto.commit", "false");
                    properties.put("auto.offset.reset", "none");
                    set(properties, arguments, rest);
                    consume(in, properties, Long.parseLong(arguments[2]), arguments[0].equals("drain"));
                }
                case "admin" -> {
                    set(properties, arguments, rest);
                    administer(in, properties);
                }
                default -> throw new IllegalArgumentException("no command " + arguments[0]);
            }
            OUT.flush();
        } catch (Exception error) {
            OUT.println(describe(error));
            OUT.flush();
            System.exit(1);
        }
    }

    private static void set(Properties properties, String[] arguments, int from) {
        for (String argument : Arrays.copyOfRange(arguments, from, arguments.length)) {
            String[] pair = argument.split("=", 2);
            properties.put(pair[0], pair[1]);
        }
    }

    // produce

    private static void produce(BufferedReader in, Properties properties) throws IOException {
        List<Future<RecordMetadata>> sent = new ArrayList<>();
        List<String> failed = new ArrayList<>(); // beside `sent`: what `send` itself threw
        try (KafkaProducer<byte[], byte[]> producer = new KafkaProducer<>(properties, new ByteArraySerializer(), new ByteArraySerializer())) {
            for (String line = in.readLine(); line != null; line = in.readLine()) {
                if (line.isEmpty()) {
                    producer.flush();
                    continue;
                }
                String[] fields = line.split("\t", -1);
                Integer partition = fields[1].equals("-") ? null : Integer.valueOf(fields[1]);
                Long timestamp = fields[2].equals("-") ? null : Long.valueOf(fields[2]);
                List<Header> headers = new ArrayList<>();
                for (int i = 5; i < fields.length; i += 2) {
                    headers.add(new RecordHeader(new String(bytes(fields[i]), StandardCharsets.UTF_8), bytes(fields[i + 1])));
                }
                try {
                    sent.add(producer.send(new ProducerRecord<>(fields[0], partition, timestamp, bytes(fields[3]), bytes(fields[4]), headers)));
                    failed.add(null);
                } catch (RuntimeException error) {
                    sent.add(null);
                    failed.add(describe(error));
                }
            }
        }
        for (int i = 0; i < sent.size(); i++) {
            OUT.println(sent.get(i) == null ? failed.get(i) : outcome(sent.get(i)));
        }
    }

    /**
     * The numbers from 0 on, round robin, with so many unanswered at most; a line for each as soon as it is answered. When the input ends,
     * whatever is unanswered is given up. The producer has Kafka's defaults.
     */
    private static void number(BufferedReader in, Properties properties, String topic, int partitions, int unanswered) throws InterruptedException {
        AtomicBoolean ended = new AtomicBoolean();
        Semaphore room = new Semaphore(unanswered);
        Thread reader = new Thread(() -> {
            try {
                while (in.readLine() != null) { }
            } catch (IOException error) {
                // over as well
            }
            ended.set(true);
            room.release(unanswered); // also of one that waits
        });
        reader.setDaemon(true);
        reader.start();
        KafkaProducer<byte[], byte[]> producer = new KafkaProducer<>(properties, new ByteArraySerializer(), new ByteArraySerializer());
        for (int number = 0; !ended.get(); number++) {
            room.acquire();
            int sent = number;
            byte[] value = ("java " + number).getBytes(StandardCharsets.UTF_8);
            producer.send(new ProducerRecord<>(topic, number % partitions, null, value), (done, error) -> {
                OUT.println(error == null
                    ? object("number", sent, "partition", done.partition(), "offset", done.hasOffset() ? done.offset() : null)
                    : object("number", sent, "error", quote(error.getClass().getSimpleName()), "message", quote(error.getMessage())));
                OUT.flush();
                room.release();
            });
        }
        producer.close(Duration.ZERO);
    }

    private static String outcome(Future<RecordMetadata> future) {
        try {
            RecordMetadata done = future.get();
            return object("topic", quote(done.topic()), "partition", done.partition(), "offset", done.hasOffset() ? done.offset() : null,
                "timestamp", done.hasTimestamp() ? done.timestamp() : null);
        } catch (ExecutionException | InterruptedException error) {
            return describe(error);
        }
    }

    // consume

    /** First line: the positions it starts at, once it has them. Last line: whether it got all that was asked for. */
    private static void consume(BufferedReader in, Properties properties, long timeoutMs, boolean onlyCount) throws IOException {
        long deadline = System.nanoTime() + timeoutMs * 1_000_000;
        try (KafkaConsumer<byte[], byte[]> consumer = new KafkaConsumer<>(properties, new ByteArrayDeserializer(), new ByteArrayDeserializer())) {
            Map<TopicPartition, Long> until = new HashMap<>();
            Map<TopicPartition, String[]> asked = new LinkedHashMap<>();
            for (String line = in.readLine(); line != null && !line.isEmpty(); line = in.readLine()) {
                String[] fields = line.split("\t", -1);
                asked.put(new TopicPartition(fields[0], Integer.parseInt(fields[1])), fields);
            }
            consumer.assign(asked.keySet());
            List<String> starts = new ArrayList<>();
            for (Map.Entry<TopicPartition, String[]> one : asked.entrySet()) {
                long start = start(consumer, one.getKey(), one.getValue()[2]);
                consumer.seek(one.getKey(), start);
                until.put(one.getKey(), until(consumer, one.getKey(), start, one.getValue()[3]));
                starts.add("[" + quote(one.getKey().topic()) + "," + one.getKey().partition() + "," + start + "]");
            }
            OUT.println("{\"start\":[" + String.join(",", starts) + "]}");
            OUT.flush();

            long records = 0;
            long bytes = 0;
            long began = System.nanoTime();
            retire(consumer, until);
            while (!until.isEmpty() && System.nanoTime() < deadline) {
                ConsumerRecords<byte[], byte[]> batch = consumer.poll(POLL);
                for (ConsumerRecord<byte[], byte[]> record : batch) {
                    Long end = until.get(new TopicPartition(record.topic(), record.partition()));
                    if (end == null || record.offset() >= end) {
                        continue;
                    }
                    records++;
                    bytes += Math.max(0, record.serializedKeySize()) + Math.max(0, record.serializedValueSize());
                    if (!onlyCount) {
                        OUT.println(json(record));
                    }
                }
                if (!batch.isEmpty()) {
                    OUT.flush();
                    retire(consumer, until);
                }
            }
            double seconds = (System.nanoTime() - began) / 1e9;
            OUT.println(object("done", until.isEmpty(), "records", records, "bytes", bytes, "seconds", seconds));
        }
    }

    private static long start(KafkaConsumer<byte[], byte[]> consumer, TopicPartition partition, String from) {
        if (from.equals("earliest")) {
            return consumer.beginningOffsets(List.of(partition)).get(partition);
        }
        if (from.startsWith("@")) {
            OffsetAndTimestamp found = consumer.offsetsForTimes(Map.of(partition, Long.valueOf(from.substring(1)))).get(partition);
            return found != null ? found.offset() : end(consumer, partition);
        }
        return from.equals("latest") ? end(consumer, partition) : Long.parseLong(from);
    }

    private static long until(KafkaConsumer<byte[], byte[]> consumer, TopicPartition partition, long start, String until) {
        if (until.equals("end")) {
            return end(consumer, partition);
        }
        return until.startsWith("+") ? start + Long.parseLong(until) : Long.parseLong(until);
    }

    private static long end(KafkaConsumer<byte[], byte[]> consumer, TopicPartition partition) {
        return consumer.endOffsets(List.of(partition)).get(partition);
    }

    /** Stops fetching partitions that were read to their end. */
    private static void retire(KafkaConsumer<byte[], byte[]> consumer, Map<TopicPartition, Long> until) {
        List<TopicPartition> finished = until.entrySet().stream()
            .filter(one -> consumer.position(one.getKey()) >= one.getValue()).map(Map.Entry::getKey).toList();
        finished.forEach(until::remove);
        consumer.pause(finished);
    }

    private static String json(ConsumerRecord<byte[], byte[]> record) {
        List<String> headers = new ArrayList<>();
        for (Header header : record.headers()) {
            headers.add("[" + quote(header.key()) + "," + quote(header.value()) + "]");
        }
        return object("topic", quote(record.topic()), "partition", record.partition(), "offset", record.offset(),
            "timestamp", record.timestamp(), "timestamp_type", quote(record.timestampType().toString()),
            "leader_epoch", record.leaderEpoch().orElse(null), "key", quote(record.key()), "value", quote(record.value()),
            "headers", "[" + String.join(",", headers) + "]");
    }

    // admin

    private static void administer(BufferedReader in, Properties properties) throws IOException, InterruptedException {
        try (Admin admin = Admin.create(properties)) {
            for (String line = in.readLine(); line != null; line = in.readLine()) {
                List<String> fields = List.of(line.split("\t", -1));
                String answer;
                try {
                    answer = administer(admin, fields.get(0), fields.subList(1, fields.size()));
                } catch (ExecutionException | RuntimeException error) {
                    answer = describe(error);
                }
                OUT.println(answer);
                OUT.flush();
            }
        }
    }

    private static String administer(Admin admin, String operation, List<String> arguments) throws ExecutionException, InterruptedException {
        String first = arguments.isEmpty() ? "" : arguments.get(0);
        switch (operation) {
            case "createTopic" -> { // name, partitions or -, replication factor or -, validate only, config ...
                Map<String, String> configs = new HashMap<>();
                for (String config : arguments.subList(4, arguments.size())) {
                    configs.put(config.split("=", 2)[0], config.split("=", 2)[1]);
                }
                Optional<Integer> partitions = Optional.of(arguments.get(1)).filter(it -> !it.equals("-")).map(Integer::valueOf);
                Optional<Short> replicas = Optional.of(arguments.get(2)).filter(it -> !it.equals("-")).map(Short::valueOf);
                CreateTopicsOptions options = new CreateTopicsOptions().validateOnly(arguments.get(3).equals("true"));
                CreateTopicsResult result = admin.createTopics(List.of(new NewTopic(first, partitions, replicas).configs(configs)), options);
                result.all().get();
                return object("topic_id", quote(result.topicId(first).get().toString()), "partitions", result.numPartitions(first).get(),
                    "replication_factor", result.replicationFactor(first).get(), "configs", json(result.config(first).get()));
            }
            case "deleteTopic" -> {
                admin.deleteTopics(List.of(first)).all().get();
                return object();
            }
            case "createPartitions" -> { // name, new total
                admin.createPartitions(Map.of(first, NewPartitions.increaseTo(Integer.parseInt(arguments.get(1))))).all().get();
                return object();
            }
            case "listTopics" -> {
                return object("topics", "[" + admin.listTopics().names().get().stream().sorted().map(Clients::quote).collect(Collectors.joining(",")) + "]");
            }
            case "describeTopic" -> {
                TopicDescription topic = admin.describeTopics(List.of(first)).allTopicNames().get().get(first);
                return object("topic", quote(topic.name()), "topic_id", quote(topic.topicId().toString()), "internal", topic.isInternal(),
                    "partitions", "[" + topic.partitions().stream().map(Clients::json).collect(Collectors.joining(",")) + "]");
            }
            case "describeCluster" -> {
                DescribeClusterResult cluster = admin.describeCluster();
                Node controller = cluster.controller().get();
                return object("cluster_id", quote(cluster.clusterId().get()), "controller", controller == null ? null : controller.id(),
                    "nodes", json(cluster.nodes().get()));
            }
            case "describeConfigs" -> { // TOPIC or BROKER, name
                ConfigResource resource = new ConfigResource(ConfigResource.Type.valueOf(first), arguments.get(1));
                return object("configs", json(admin.describeConfigs(List.of(resource)).all().get().get(resource)));
            }
            case "listOffsets" -> { // topic, partition, earliest | latest | max | milliseconds
                TopicPartition partition = new TopicPartition(first, Integer.parseInt(arguments.get(1)));
                OffsetSpec spec = switch (arguments.get(2)) {
                    case "earliest" -> OffsetSpec.earliest();
                    case "latest" -> OffsetSpec.latest();
                    case "max" -> OffsetSpec.maxTimestamp();
                    default -> OffsetSpec.forTimestamp(Long.parseLong(arguments.get(2)));
                };
                ListOffsetsResultInfo found = admin.listOffsets(Map.of(partition, spec)).partitionResult(partition).get();
                return object("offset", found.offset(), "timestamp", found.timestamp(), "leader_epoch", found.leaderEpoch().orElse(null));
            }
            default -> throw new IllegalArgumentException("no operation " + operation);
        }
    }

    private static String json(TopicPartitionInfo partition) {
        return object("partition", partition.partition(), "leader", partition.leader() == null ? null : partition.leader().id(),
            "replicas", json(partition.replicas()), "isr", json(partition.isr()));
    }

    private static String json(Collection<Node> nodes) {
        return nodes.stream().map(node -> object("id", node.id(), "host", quote(node.host()), "port", node.port(), "rack", quote(node.rack())))
            .collect(Collectors.joining(",", "[", "]"));
    }

    private static String json(Config configs) {
        List<Object> pairs = new ArrayList<>();
        for (ConfigEntry entry : configs.entries()) {
            pairs.add(entry.name());
            pairs.add(object("value", quote(entry.value()), "source", quote(Objects.toString(entry.source(), null)), "type", quote(Objects.toString(entry.type(), null)),
                "read_only", entry.isReadOnly(), "sensitive", entry.isSensitive()));
        }
        return object(pairs.toArray());
    }

    // text

    private static byte[] bytes(String field) {
        return field.equals("-") ? null : Base64.getDecoder().decode(field);
    }

    private static String describe(Throwable error) {
        Throwable cause = error instanceof ExecutionException && error.getCause() != null ? error.getCause() : error;
        return object("error", quote(cause.getClass().getSimpleName()), "message", quote(cause.getMessage()));
    }

    /** Names take turns with values, which are JSON already: numbers, booleans, null, or strings from here. */
    private static String object(Object... pairs) {
        StringBuilder text = new StringBuilder("{");
        for (int i = 0; i < pairs.length; i += 2) {
            text.append(i == 0 ? "" : ",").append(quote((String) pairs[i])).append(':').append(Objects.toString(pairs[i + 1], "null"));
        }
        return text.append('}').toString();
    }

    private static String quote(byte[] bytes) {
        return bytes == null ? "null" : '"' + Base64.getEncoder().encodeToString(bytes) + '"';
    }

    private static String quote(String text) {
        if (text == null) {
            return "null";
        }
        StringBuilder quoted = new StringBuilder("\"");
        for (char c : text.toCharArray()) {
            if (c == '"' || c == '\\') {
                quoted.append('\\').append(c);
            } else if (c < ' ') {
                quoted.append(String.format("\\u%04x", (int) c));
            } else {
                quoted.append(c);
            }
        }
        return quoted.append('"').toString();
    }
}
